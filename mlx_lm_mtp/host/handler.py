"""``mlx_lm.server``'s handler of HTTP requests: what a request says about drafts.

mlx-lm carries a request's ``num_draft_tokens`` from here to the generation. ``Drafts``
is that number, and brings back what became of the drafts.
"""

import json
import logging
import sys
from typing import Any, Optional

from ..depth import MAX_DRAFTS
from ..rounds import MTPError
from ..stats import MTPStats
from .flags import AssistantPath
from .patch import Wrap

log = logging.getLogger("mlx_lm_mtp")

# Drafts of a draft model that is not ours, where nothing is said: mlx-lm's default.
ORDINARY = 3
# Of these MLX takes no whole numbers beyond 32 bits.
NUMBERS = (
    "temperature",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
)
# What these say is the client's to mend.
MISTAKES = (ValueError, TypeError, AssertionError, OverflowError)


class Drafts(int):
    """How many tokens a request drafts per round, and what became of them.

    Attributes:
        pinned: The number, or None where the choice is ours.
        stats: Filled while generating.
        accepted: Emitted tokens that the drafter proposed.
        served: Whether an assistant took part.
    """

    pinned: Optional[int]
    stats: MTPStats
    accepted: int
    served: bool

    @classmethod
    def of(cls, pinned: Optional[int]) -> "Drafts":
        """The drafts of a request that asked for this number."""
        if isinstance(pinned, Drafts):
            return pinned
        self = cls(ORDINARY if pinned is None else pinned)
        self.pinned, self.stats = pinned, MTPStats()
        self.accepted, self.served = 0, False
        return self

    def usage(self) -> dict[str, int]:
        """OpenAI's names for it."""
        drafted = sum(self.stats.drafted)
        return {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": drafted - self.accepted,
        }

    def report(self) -> None:
        """Tell the log, at the end of the request."""
        if self.stats.drafted:
            log.info(self.stats.summary())
        elif self.pinned != 0:
            log.info(self.stats.unused())


def wrappers() -> dict[str, Wrap]:
    """What takes the place of each name."""
    return {
        "APIHandler.do_POST": _wrap_post,
        "APIHandler.validate_model_parameters": _wrap_validate,
        "APIHandler._set_completion_headers": _wrap_headers,
        "APIHandler.generate_response": _wrap_usage,
        "APIHandler.completion_usage_response": _wrap_usage,
    }


def is_asked(response_generator: Any) -> bool:
    """Whether the server was started with an assistant."""
    return isinstance(response_generator.cli_args.draft_model, AssistantPath)


def _wrap_validate(original: Any) -> Any:
    def validate_model_parameters(self: Any) -> None:
        pinned = self.num_draft_tokens
        if is_asked(self.response_generator):
            if pinned is None:
                pinned = self.response_generator.cli_args.num_draft_tokens
            self.num_draft_tokens = Drafts.of(pinned) if pinned is None else pinned
        original(self)
        if is_asked(self.response_generator):
            _check(self.body)
            if pinned is not None:
                # Everyone waits for a round, however many drafts one of them wants.
                asked = self.response_generator.cli_args.num_draft_tokens
                pinned = min(pinned, max(MAX_DRAFTS, asked or 0))
        self.num_draft_tokens = Drafts.of(pinned)

    return validate_model_parameters


def _check(body: dict[str, Any]) -> None:
    """What mlx-lm does not check, and its serving thread would stumble over."""
    if not isinstance(body.get("draft_model", ""), str | None):
        raise ValueError("draft_model must be a string, or null for none")
    stop = body.get("stop") or []
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise ValueError("stop must be a string or a list of strings")
    if not 0 <= (body.get("seed") or 0) < 2**64:
        raise ValueError("seed must be at least 0 and below 2**64")
    for name in NUMBERS:
        number = body.get(name)
        if isinstance(number, int) and abs(number) >= 2**31:
            raise ValueError(f"{name} is too large")
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise ValueError("stream_options must be an object")
    if options is not None:
        options.setdefault("include_usage", False)


def _wrap_post(original: Any) -> Any:
    def do_POST(self: Any) -> None:
        if not is_asked(self.response_generator):
            return original(self)
        try:
            original(self)
        except ConnectionError:
            log.info("the client left before its answer")
        except Exception as e:
            log.warning("request failed: %s", e, exc_info=not isinstance(e, MISTAKES))
            _answer(self, e)

    return do_POST


def _answer(handler: Any, error: Exception) -> None:
    """Send an error, also where an answer has begun."""
    line = " ".join(str(error).split()) or type(error).__name__
    body = json.dumps({"error": line}).encode()
    # Missing before a response begins, empty once its headers are sent.
    if getattr(handler, "_headers_buffer", None) == []:
        handler.wfile.write(b"data: " + body + b"\n\n")
        return
    handler._headers_buffer = []
    handler._set_completion_headers(400 if isinstance(error, MISTAKES) else 500)
    handler.end_headers()
    handler.wfile.write(body)


def _wrap_headers(original: Any) -> Any:
    def _set_completion_headers(self: Any, status_code: int = 200) -> None:
        # mlx-lm takes every error before a generation for an unknown model.
        if status_code == 404 and isinstance(sys.exc_info()[1], MTPError):
            status_code = 400
        original(self, status_code)

    return _set_completion_headers


def _wrap_usage(original: Any) -> Any:
    def with_usage(self: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, *args, **kwargs)
        drafts = self.num_draft_tokens
        if "usage" in response and isinstance(drafts, Drafts) and drafts.served:
            response["usage"]["completion_tokens_details"] = drafts.usage()
        return response

    return with_usage
