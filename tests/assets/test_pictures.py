"""Pictures are real PNG files inside Markdown, and show what they were given."""

import base64
import io
import re

import numpy as np
from matplotlib.image import imread

from assets.pictures import lengths, lines


def pixels(markdown: str) -> np.ndarray:
    found = re.fullmatch(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", markdown)
    assert found
    return imread(io.BytesIO(base64.b64decode(found[1])), format="png")


def test_lengths():
    one = lengths({"prompt": np.array([1, 2, 3]), "chosen": np.array([5, 9]), "rejected": np.array([], dtype=np.int32)})
    other = lengths(
        {"prompt": np.array([1, 2, 3]), "chosen": np.array([5, 5]), "rejected": np.array([], dtype=np.int32)}
    )
    assert pixels(one.value or "").shape == pixels(other.value or "").shape == (240, 576, 4)
    assert (pixels(one.value or "") != pixels(other.value or "")).any()
    assert len(one.value or "") < 60_000


def test_lines_leave_gaps_for_what_is_unknown():
    whole = lines("fill", {"fill": ([1, 2, 3], [0.5, 0.5, 0.5])}, x="step", y="share")
    gap = lines("fill", {"fill": ([1, 2, 3], [0.5, float("nan"), 0.5])}, x="step", y="share")
    assert (pixels(whole.value or "") != pixels(gap.value or "")).any()
    assert pixels(lines("empty", {}, x="step", y="share").value or "").any()
