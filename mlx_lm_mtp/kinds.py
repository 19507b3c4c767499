"""How a drafter is told from any other model. Imports nothing, so it cannot fail."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DRAFTERS = ("gemma4_assistant", "gemma4_unified_assistant")


def is_drafter(model: "Any") -> bool:
    """Whether a loaded model is a drafter of ours."""
    ours = getattr(model, "model_type", None) in DRAFTERS
    return ours and hasattr(model, "candidates")
