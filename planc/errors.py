"""The exceptions that reach a user: in goes what went wrong and the next step, out come one line and an exit code."""


class PlancError(Exception):
    """A failure whose message is shown as it is, without a traceback. The process exits with 1."""

    exit_code = 1


class UsageError(PlancError):
    """The call itself is wrong: an unknown option value, a flag that contradicts another. The process exits with 2."""

    exit_code = 2
