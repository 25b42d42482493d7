"""The command `pairledger`.

A command is a module of `pipeline.commands` with a sentence, an example, its arguments and a function that gives the
exit code. Nothing heavy is imported before a command runs, so that help shows at once. A fault that a person can mend
is one sentence on stderr and the exit code of its class (`training.errors`); usage errors exit 2 and name what is near.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from pipeline.commands import demo, diff, export, inspect, ledger, plan, prepare, report, train, ui
from training.errors import PairLedgerError

COMMANDS = (prepare, inspect, diff, plan, train, export, ledger, report, demo, ui)
CODES = """each command shows an example: pairledger COMMAND --help

exit codes: 0 done · 1 failed · 2 usage or configuration · 3 input refused · 4 identity mismatch · 5 no such device
            128+n ended by signal n"""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, that names what is near to an unknown option or choice."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    @property
    def options(self) -> set[str]:
        """Every option of this parser and of those below it."""
        below = [one for action in self._actions if isinstance(action.choices, dict) for one in action.choices.values()]
        return {*self._option_string_actions, *(option for one in below for option in one.options)}

    def check_options(self, given: Iterable[str]) -> None:
        """Refuse unknown options before argparse says that a required one is missing."""
        for word in given:
            name = word.partition("=")[0]
            if word == "--":
                return
            if name.startswith("--") and name not in self.options:
                self.error(f"there is no option {name}{near(name, self.options)}")

    def error(self, message: str) -> NoReturn:
        """One sentence and the way to the help; exit 2."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        message += near(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}see {self.prog} --help\n")


def near(word: str, known: Iterable[str]) -> str:
    """What to add to a refusal: the known words that are near."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line: the parser, and each command's own by name."""
    top = Parser(
        prog="pairledger",
        description="Preference data in, a DPO-trained model out, and an exact account of every token on the way.",
        epilog=CODES,
    )
    top.add_argument("--version", action="version", version=f"pairledger {version('pairledger')}")
    below = top.add_subparsers(metavar="COMMAND", required=True)
    own: dict[str, Parser] = {}
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        made = below.add_parser(
            name, help=command.HELP, description=command.ABOUT, epilog=f"example:\n{command.EXAMPLE}"
        )
        command.arguments(made)
        made.set_defaults(run=command.run, command=name)
        own[name] = made
    return top, own


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command; a usage error ends the process with 2."""
    top, own = parsers()
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is not None and name not in own:
        top.error(f"there is no command {name!r}{near(name, own)}")
    if name is None:
        top.check_options(argv)
    else:
        own[name].check_options(argv[argv.index(name) + 1 :])
    return top.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except PairLedgerError as error:
        print(f"pairledger {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
