"""The public face: a source is made once, then edited by changing its prompt."""

from fisedit.editor.preview import Preview
from fisedit.editor.sessions import SessionMixin

__all__ = ["Editor", "Preview"]


class Editor(SessionMixin):
    """The editor: it generates a picture and edits it, computing only what the words change.

    Args:
        pipe: a Stable Diffusion 1.x or 2.x pipeline. Editors may share one.
        model: its name, for saved sessions.
        vae: path of its autoencoder, for saved sessions; "" for the model's own.
        max_recorded_bytes: recorded features kept in the memory of the device; None for half of what is free there. On
            a CPU steps that do not fit lie on disk and are fetched while an edit runs. On a GPU they wait in the host's
            memory first.
        max_host_bytes: those that a GPU's memory does not hold, kept in the host's; None for half of what is free.
        max_disk_bytes: those that do not fit there, kept on disk; None for a quarter of what is free, 0 for none.
            What fits nowhere is dropped, the least recently used first, and made again when it is needed.
        graphs: replay sparse steps from captured graphs of fused kernels; None for what the environment's
            FISEDIT_GRAPHS says, 0 or 1, or else on CUDA devices. Elsewhere a stand-in runs in their place, which shows
            that they are right and saves no time. A UNet or an edit that they cannot run is run eagerly, and
            `stats.uncaptured` says why.
        cache_dtype: what recorded features are kept in: "int8", "int4" for the least memory, or "model" for the model's
            own; "auto" for int8 where maps are large, and the model's own on a GPU.

    Raises:
        UnsupportedModuleError: the UNet has a layer without an exact sparse counterpart.
        InputError: another name of a dtype, or bounds that are no numbers of bytes.
    """
