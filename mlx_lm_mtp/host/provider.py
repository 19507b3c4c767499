"""``mlx_lm.server``'s models: the drafter beside the target.

mlx-lm loads the target as without us, under the key it has without a draft model. So
requests with and without an assistant share the target and its prompt caches.
"""

from typing import Any, Optional

from ..rounds import MTPError
from .flags import AssistantPath, Drafting
from .patch import Wrap

DEFAULT = "default_model"  # mlx-lm's word for what the command line named


def wrappers() -> dict[str, Wrap]:
    """What takes the place of each name."""
    return {
        "ModelProvider.load": _wrap_load,
        "ModelProvider.reset": _wrap_reset,
    }


def _wrap_load(original: Any) -> Any:
    def load(
        self: Any,
        model_path: Any,
        adapter_path: Any = None,
        draft_model_path: Any = None,
    ) -> Any:
        path = _assistant_path(self, draft_model_path)
        if path is None:
            if isinstance(self.draft_model, Drafting):
                self.draft_model = None
            return original(self, model_path, adapter_path, draft_model_path)
        if self.is_distributed:
            raise MTPError("an assistant runs on one machine: drop draft_model")
        loaded = original(self, model_path, adapter_path, None)
        # The command line's assistant need not fit the models that requests name.
        strict = draft_model_path != DEFAULT or model_path == DEFAULT
        self.draft_model = _drafting(self, path, strict)
        return loaded

    return load


def _wrap_reset(original: Any) -> Any:
    def reset(self: Any) -> None:
        original(self)
        self.mtp_held = None

    return reset


def _assistant_path(provider: Any, draft_model_path: Any) -> Optional[AssistantPath]:
    """What the request or the command line named, if that is an assistant."""
    from ..hub import AUTO, holds_assistant

    named = provider._draft_model_map.get(draft_model_path, draft_model_path)
    if named is None or isinstance(named, AssistantPath):
        return named
    known = provider.__dict__.setdefault("mtp_paths", {})
    if named not in known:
        try:
            ours = named == AUTO or holds_assistant(named)
        except MTPError as e:
            # Told before mlx-lm gives up the loaded target for it.
            raise FileNotFoundError(str(e)) from e
        default = provider._draft_model_map[DEFAULT]
        known[named] = AssistantPath.like(default, named) if ours else None
    return known[named]


def why_not(provider: Any) -> Optional[str]:
    """Why no drafter is beside the loaded target, if so."""
    if isinstance(provider.draft_model, Drafting):
        return None
    held = provider.__dict__.get("mtp_held")
    return str(held[1]) if held else "its draft_model is no Gemma 4 assistant"


def _drafting(provider: Any, path: AssistantPath, strict: bool) -> Optional[Drafting]:
    """The drafter for the loaded target; None, with the reason, where it may lack."""
    held = provider.__dict__.get("mtp_held")
    if held is None or held[0] != path:
        try:
            held = path, path.load(provider.model)
        except MTPError as e:
            held = path, e
        provider.mtp_held = held
    found = held[1]
    if isinstance(found, Drafting):
        return found
    if strict:
        raise found
    return None
