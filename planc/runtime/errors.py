"""Errors that belong to one request: they reach the client in OpenAI's shape and never stop the engine."""

from planc.errors import PlancError


class RequestError(PlancError):
    """One request cannot be served as it stands.

    status is the HTTP status, param the field at fault, code a machine-readable reason (both may be None).
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
