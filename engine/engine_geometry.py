"""What a service must know of its engine before any weight is read. No torch."""

from pathlib import Path

from core.kv_spec import KVSpec
from core.model_path import resolve_model
from core.worker import Role, WorkerShape
from engine.config import EngineConfig
from engine.model_config import ModelConfig, kv_spec, load_model_config


class EngineGeometry:
    """Where the model is, its shape, and the pool that follows from both. Raises ModelLoadError."""

    def __init__(self, config: EngineConfig) -> None:
        self.path: Path = resolve_model(config.model)
        self.model: ModelConfig = load_model_config(self.path)
        self.kv_spec: KVSpec = kv_spec(self.model, config.block_size, config.dtype)
        self.num_blocks = config.pool_blocks(self.kv_spec.block_bytes)
        self.context_len = min(config.max_context_len or self.model.context_len, self.model.context_len)
        self.max_local_tokens = config.max_local_tokens
        self._max_batch = config.max_batch

    def shape(self, role: Role) -> WorkerShape:
        """What a worker of this geometry registers."""
        return WorkerShape(
            role=role,
            kv_spec=self.kv_spec,
            context_len=self.context_len,
            vocab_size=self.model.vocab_size,
            num_blocks=self.num_blocks,
            max_batch=self._max_batch,
            max_local_tokens=self.max_local_tokens if role is Role.DECODE else 0,
        )
