"""The tree of errors a person can meet.

    PairLedgerError            1  something failed
    ├── ConfigError            2  usage or configuration
    ├── InputError             3  an input was refused
    │   ├── SourceError           a preference file, its format, or its rows
    │   ├── TokenizerError        a tokenizer or its chat template
    │   ├── DatasetError          a prepared dataset: missing, cut, altered, foreign
    │   ├── PlanError             a plan that cannot be made
    │   └── ModelError            a model that cannot be loaded or served
    ├── IdentityError          4  a fingerprint that does not match what it is compared with
    ├── DeviceError            5  a device that is not there
    ├── TrainingError          1  a run that cannot go on
    │   └── Stopped               one that was told to stop before its first step
    └── LedgerError            1  the ledger or its database

The number is the exit code of the command that meets the error. Only faults a person can mend are in this tree; faults
of ours are asserts.
"""

from __future__ import annotations


class PairLedgerError(Exception):
    """Base of every error whose message is meant for a person."""

    exit_code = 1


class ConfigError(PairLedgerError):
    """Usage or configuration is wrong."""

    exit_code = 2


class InputError(PairLedgerError):
    """An input was refused; the message names file, line and field where there are any."""

    exit_code = 3


class SourceError(InputError):
    """A preference file, its format, or all of its rows."""


class TokenizerError(InputError):
    """A tokenizer or a chat template that cannot be used."""


class DatasetError(InputError):
    """A prepared dataset that is missing, cut, altered or of a foreign version."""


class PlanError(InputError):
    """Pairs and limits from which no step plan or packing can be made."""


class ModelError(InputError):
    """A model that cannot be loaded, or whose layers the kernels cannot serve."""


class IdentityError(PairLedgerError):
    """Two fingerprints that had to be equal are not."""

    exit_code = 4


class DeviceError(PairLedgerError):
    """The device asked for is not there."""

    exit_code = 5


class TrainingError(PairLedgerError):
    """A run that cannot go on."""


class Stopped(TrainingError):
    """A run was told to stop before its first step; what it has scored is kept, and there is nothing else to save."""


class LedgerError(PairLedgerError):
    """The ledger's files or its database."""
