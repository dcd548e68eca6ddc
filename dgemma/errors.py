"""Errors meant for people. Each message says what was given, what is allowed, and what to do."""


class DgemmaError(Exception):
    """The work failed for a reason the user can act on; the command line exits with 1."""


class UsageError(DgemmaError):
    """The call itself was wrong: an option, a path or a value; the command line exits with 2."""


class ConfigError(DgemmaError):
    """A configuration file holds something this build does not understand."""


class CheckpointError(DgemmaError):
    """A checkpoint is incomplete, damaged or of another shape."""


class PromptTooLong(UsageError):
    """The prompt and the answer together do not fit the context."""
