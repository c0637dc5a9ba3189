"""LogitEdits applied to rows of logits, on whatever device they are: a few operations for the whole batch."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from engine.logit_rules import Entries, LogitEdits


def apply_edits(logits: Tensor, edits: LogitEdits) -> None:
    """logits [R, V] float32, changed in place. The order is vLLM's: what may be drawn at all, bias, penalties, and
    min_p relative to the peak that then is."""
    if len(edits.masked):
        _mask(logits, edits)
    _allow(logits, edits)
    if len(edits.banned):
        logits[_index(edits.banned, logits)] = -torch.inf
    if len(edits.biased):
        logits[_index(edits.biased, logits)] += _on(edits.biases, logits)
    if len(edits.counted):
        _penalise(logits, edits)
    bounds = _on(edits.log_min_ps, logits)
    if bool((edits.log_min_ps > -torch.inf).any()):
        floors = logits.amax(-1, keepdim=True) + bounds[:, None]
        logits.masked_fill_(logits < floors, -torch.inf)


def _mask(logits: Tensor, edits: LogitEdits) -> None:
    rows, masks = _on(edits.masked, logits), _on(edits.masks, logits)
    bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    is_banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)


def _allow(logits: Tensor, edits: LogitEdits) -> None:
    for row, ids in edits.allowed.items():
        own = _on(ids, logits)
        kept = logits[row, own]
        logits[row] = -torch.inf
        logits[row, own] = kept


def _penalise(logits: Tensor, edits: LogitEdits) -> None:
    """Repetition scales towards less likely, frequency counts, presence does not; as in OpenAI's and vLLM's
    definitions."""
    where = _index(edits.counted, logits)
    values, counts = logits[where], _on(edits.counts, logits)
    repetition = _on(edits.repetition, logits)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= _on(edits.frequency, logits) * counts + _on(edits.presence, logits) * (counts > 0)
    logits[where] = values


def _index(entries: Entries, logits: Tensor) -> tuple[Tensor, Tensor]:
    return _on(entries.rows, logits), _on(entries.ids, logits)


def _on(values: npt.NDArray[Any], logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
