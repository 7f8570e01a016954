"""Everything that fisedit raises on purpose. Knows nothing about tensors, models or files.

A message is one line that says what is wrong, what was got, and what to do. `code` is stable and meant for machines.
"""


class FisEditError(Exception):
    """Root of every error raised on purpose; `code` never changes between releases."""

    code = "fisedit"


class InputError(FisEditError, ValueError):
    """An argument is out of range: steps, size, seed, guidance, scheduler name."""

    code = "input"


class PromptError(InputError):
    """A prompt that cannot be used, such as an empty one."""

    code = "prompt"


class MaskError(InputError):
    """A mask of the wrong size, type or content."""

    code = "mask"


class ModelError(FisEditError):
    """A model that is missing, damaged, unsafe to load, or of another architecture."""

    code = "model"


class UnsupportedModuleError(ModelError):
    """The model's graph holds a layer that the sparse engine has no exact counterpart for."""

    code = "unsupported-module"


class AdapterError(ModelError):
    """An adapter that is missing, damaged, of another kind or another model's, or that is in the model already."""

    code = "adapter"


class SessionError(FisEditError):
    """The editor is not in a state for this call: no source yet, nothing to undo, a damaged session folder."""

    code = "session"


class PageError(SessionError):
    """A page of recorded features is damaged or gone; what was recorded is made again."""

    code = "page"


class NumericsError(FisEditError):
    """NaN or infinity in weights or latents."""

    code = "numerics"


class MeasurementError(FisEditError):
    """Runs that are alike took too differently to tell what this machine takes: other programs ran beside them."""

    code = "measurement"


class Cancelled(FisEditError):
    """Raised by an `on_step` callback to stop the work; the editor stays as it was before the call."""

    code = "cancelled"


def as_text(value: object, letters: int = 80) -> str:
    """Return a value as text for a message: on one line, and cut.

    Args:
        value: a value of any type; one that Python refuses to print, as a whole number of 5000 digits, is told by its
            type.
        letters: length of the text at most.
    """
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} that is too large to print"
    return text[:letters]
