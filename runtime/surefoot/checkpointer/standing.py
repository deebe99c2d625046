"""Whether a program still stands where its last finished step left it: only then may its state be saved as that step's.

Saved later, under the same number, the batch taken since would be lost, or a gradient counted twice. Asked by `facade`
wherever it saves outside of `step`: at the program's end, and when the script asks.
"""

from __future__ import annotations

import sys
from typing import Any


class Standing:
    """Of one program; `loader` is what was named so, if anything was."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._tells = hasattr(loader, "consumed")
        self._optimizing = False
        self.consumed: Any = None
        """What the loader had handed out last when the last step was finished; None if it does not tell."""

    def step_ends(self) -> None:
        """The state is that of the step that ends here, or of the one that was restored."""
        self._optimizing, self.consumed = False, self._handed_out()

    def optimizer_begins(self) -> None:
        """Tensors change from here on."""
        self._optimizing = True

    def left_by(self) -> str | None:
        """What has happened since the last step was finished; None while its state stands.

        Where no loader tells what it handed out, an exception that is being handled is taken to have come within a step.
        """
        if self._optimizing:
            return "an optimizer has begun"
        if self._handed_out() != self.consumed:
            return "a batch was taken from the loader"
        if not self._tells and sys.exc_info()[0] is not None:
            return "an exception is being handled"
        return None

    def _handed_out(self) -> Any:
        return self._loader.consumed if self._tells else None
