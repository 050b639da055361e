"""Everything this package raises on purpose, and how it looks on the wire: one tree, one table.

AgentserveError
├── ApiError                        answered to the client as an `error` object; never logged with its message
│   ├── InvalidValue                a known field holds something else than accepted
│   │   ├── UnsupportedValue        valid in the standard, not done by this server
│   │   └── ContextTooLong
│   ├── UnknownEvent, MessageTooLarge, BodyTooSlow
│   ├── PreviousResponseNotFound, NotFound, ModelNotFound, ResponseRunning
│   ├── InvalidStreamId, StreamLimitReached, ConnectionLimitReached
│   ├── InvalidApiKey, Forbidden, InsufficientQuota, UpgradeRequired
│   ├── IdempotencyConflict, RateLimitExceeded
│   └── ServerError
├── TurnFailure                     ends a response that was created, as `response.failed`
├── ConfigError                     the process does not start
├── IllegalEvent                    our own bug: an event out of canonical order
└── LostEvents                      our own bug: a response cannot tell again what it has sent

Messages name the field, what was got and what is accepted; they may quote what the client sent and so stay out of the log.
"""

from __future__ import annotations

from typing import ClassVar


class AgentserveError(Exception):
    """Base of this package's errors."""


class ApiError(AgentserveError):
    """A refusal of one request. param: path of the field, e.g. `input[2].content`."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_value"
    type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidValue(ApiError):
    pass


class UnsupportedValue(InvalidValue):
    code = "unsupported_value"


class ContextTooLong(InvalidValue):
    """Outside of a turn; a turn fails with a TurnFailure of this code."""

    code = "context_length_exceeded"


class UnknownEvent(ApiError):
    code = "unknown_event"


class MessageTooLarge(ApiError):
    code = "message_too_large"


class BodyTooSlow(ApiError):
    status = 408
    code = "request_timeout"


class PreviousResponseNotFound(ApiError):
    code = "previous_response_not_found"

    def __init__(self, response_id: str, why: str = "not found.") -> None:
        super().__init__(f"Previous response with id '{response_id}' {why}", "previous_response_id")


class InvalidStreamId(ApiError):
    code = "invalid_stream_id"


class StreamLimitReached(ApiError):
    code = "websocket_stream_limit_reached"


class ConnectionLimitReached(ApiError):
    code = "websocket_connection_limit_reached"


class InvalidApiKey(ApiError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(ApiError):
    status = 403
    code = "forbidden"
    type = "permission_error"


class InsufficientQuota(ApiError):
    """Waiting does not help, so it is no 429."""

    status = 403
    code = "insufficient_quota"
    type = "insufficient_quota"


class NotFound(ApiError):
    status = 404
    code = "not_found"


class ResponseRunning(ApiError):
    status = 409
    code = "response_running"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' is still running; wait for its end, or cancel it.", "response_id")


class ModelNotFound(ApiError):
    status = 404
    code = "model_not_found"

    def __init__(self, got: str, accepted: tuple[str, ...]) -> None:
        super().__init__(f"model '{got}' is not served here; accepted: {', '.join(accepted)}", "model")


class MethodNotAllowed(ApiError):
    status = 405
    code = "method_not_allowed"


class IdempotencyConflict(ApiError):
    status = 409
    code = "idempotency_conflict"


class UpgradeRequired(ApiError):
    status = 426
    code = "upgrade_required"


class RateLimitExceeded(ApiError):
    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"

    def __init__(self, what: str, retry_after_s: int) -> None:
        super().__init__(f"{what}; try again in {retry_after_s}s")
        self.retry_after_s = retry_after_s


class ServerError(ApiError):
    status = 500
    code = "server_error"
    type = "server_error"


class TurnFailure(AgentserveError):
    """Ends a created response as failed.

    code: context_length_exceeded, invalid_prompt, invalid_value, deadline_exceeded or server_error.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class ConfigError(AgentserveError):
    """A setting that cannot be used; the message says which, where it came from and what is accepted."""


class IllegalEvent(AgentserveError):
    def __init__(self, state: str, event: str) -> None:
        super().__init__(f"event {event} is not legal in state {state}")


class LostEvents(AgentserveError):
    def __init__(self, told: int, sent: int) -> None:
        super().__init__(f"the history of a response ends at event {told}, but {sent} were sent")
