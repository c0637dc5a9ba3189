"""Weights come whole and right from safetensors and GGUF, or loading stops with the tensor's name."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file

from engine.gguf_file import GGUFFile
from engine.model_config import ModelLoadError, RopeKind, load_model_config
from engine.testing import make_tiny_model
from engine.weights import expected_shapes, load_weights

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def tiny(tmp_path):
    return make_tiny_model(tmp_path / "tiny")


def load(path, dtype=torch.float32, **options):
    return load_weights(path, load_model_config(path), dtype, **options)


def rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_every_tensor_of_the_model(tiny):
    weights = load(tiny)
    assert {name: tuple(value.shape) for name, value in weights.items()} == expected_shapes(
        load_model_config(tiny)
    )
    assert torch.equal(weights[Q_PROJ], load_file(tiny / "model.safetensors")[Q_PROJ])
    assert load(tiny, torch.bfloat16)[Q_PROJ].dtype is torch.bfloat16


def test_shards_with_an_index(tiny):
    whole = load(tiny)
    names = sorted(whole)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: whole[name] for name in part}, tiny / file)
    (tiny / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(value, whole[name]) for name, value in load(tiny).items())
    (tiny / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"b\.safetensors"):
        load(tiny)


def test_progress_ends_at_the_whole(tiny):
    calls = []
    load(tiny, on_progress=lambda done, total: calls.append((done, total)))
    done, totals = [call[0] for call in calls], {call[1] for call in calls}
    assert len(totals) == 1 and done == sorted(done)
    assert done[-1] > 0.9 * totals.pop()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"{Q_PROJ} is missing"),
        (lambda tensors: tensors.update({Q_PROJ: torch.zeros(3, 3)}), rf"{Q_PROJ} has shape \(3, 3\)"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is not one"),
        (
            lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            "model.layers.2.input_layernorm.weight is not one",
        ),
    ],
)
def test_a_wrong_tensor_is_named(tiny, change, named):
    rewrite(tiny, change)
    with pytest.raises(ModelLoadError, match=named):
        load(tiny)


def test_tied_and_untied_heads(tiny, tmp_path):
    rewrite(tiny, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 64)}))
    assert "lm_head.weight" not in load(tiny)
    untied = make_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    assert load(untied)["lm_head.weight"].shape == (512, 64)
    rewrite(untied, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lm_head.weight is missing"):
        load(untied)


def test_a_stored_rotary_table_is_ignored(tiny):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tiny, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert name not in load(tiny)


def test_a_truncated_safetensors_file(tiny):
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated safetensors"):
        load(tiny)


# --- GGUF ---


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    if not name.startswith("model.layers."):
        stem, kind = name.rsplit(".", 1)
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def permuted(value, num_heads):
    """What converters of the llama architecture do to the rows of q and k."""
    return (
        value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
        .swapaxes(1, 2)
        .reshape(value.shape)
    )


def write_gguf(path, directory, kind=Q.F32, extra=None, skip=(), **changed):
    """The directory's model as a GGUF file, its matrices of type `kind`."""
    config = load_model_config(directory)
    arch = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}[
        config.architecture
    ]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(changed.get("num_layers", config.num_layers))
    writer.add_context_length(config.context_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(258)
    writer.add_token_list(["a", "ü", "<|im_end|>"])
    if "rope_type" in changed:
        writer.add_rope_scaling_type(changed["rope_type"])
        writer.add_rope_scaling_factor(2.0)
    for name, tensor in (load_weights(directory, config, torch.float32) | (extra or {})).items():
        if name in skip:
            continue
        value = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            value = permuted(value, config.num_heads if "q_proj" in name else config.num_kv_heads)
        target = name if name == "rope_freqs.weight" else gguf_name(name)
        if value.ndim == 2 and kind is not Q.F32:
            writer.add_tensor(target, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_has_the_weights_of_its_directory(tmp_path, kind, is_tied):
    directory = make_tiny_model(tmp_path / "m", kind, tie_word_embeddings=is_tied)
    expected, actual = load(directory), load(write_gguf(tmp_path / "m.gguf", directory))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Q.F16, 1e-3), (Q.BF16, 5e-3), (Q.Q8_0, 6e-3), (Q.Q5_1, 5e-2), (Q.Q4_1, 9e-2), (Q.Q4_0, 0.15)],
)
def test_quantised_types(tmp_path, tiny, kind, error):
    expected, actual = load(tiny), load(write_gguf(tmp_path / "m.gguf", tiny, kind))
    for name, value in actual.items():
        assert (value - expected[name]).abs().max() <= error * expected[name].abs().max(), name
    assert not torch.equal(actual[Q_PROJ], expected[Q_PROJ])


def test_reading_agrees_with_the_gguf_package(tmp_path, tiny):
    path = write_gguf(tmp_path / "m.gguf", tiny, Q.Q4_1)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with GGUFFile(path) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "ü", "<|im_end|>"]
        assert file.tensors.keys() == theirs.keys()
        for name, tensor in file.tensors.items():
            expected = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
            np.testing.assert_array_equal(file.read(tensor), expected)


def test_stored_rope_factors(tmp_path, tiny):
    factors = torch.linspace(1, 8, 8)
    path = write_gguf(tmp_path / "m.gguf", tiny, extra={"rope_freqs.weight": factors})
    assert load_model_config(path).rope_scaling.kind is RopeKind.STORED
    assert torch.equal(load(path, torch.bfloat16)["rope_freqs.weight"], factors)


def test_rope_scaling_of_a_gguf_file(tmp_path, tiny):
    linear = write_gguf(tmp_path / "l.gguf", tiny, rope_type=gguf.RopeScalingType.LINEAR)
    assert load_model_config(linear).rope_scaling.factor == 2.0
    with pytest.raises(ModelLoadError, match="yarn"):
        load_model_config(write_gguf(tmp_path / "y.gguf", tiny, rope_type=gguf.RopeScalingType.YARN))


def test_a_block_count_that_the_tensors_do_not_match(tmp_path, tiny):
    with pytest.raises(ModelLoadError, match=r"model.layers.2.\S+ is missing"):
        load(write_gguf(tmp_path / "more.gguf", tiny, num_layers=3))
    with pytest.raises(ModelLoadError, match=r"model.layers.1.\S+ is not one"):
        load(write_gguf(tmp_path / "less.gguf", tiny, num_layers=1))


def test_a_missing_gguf_tensor(tmp_path, tiny):
    with pytest.raises(ModelLoadError, match=f"{Q_PROJ} is missing"):
        load(write_gguf(tmp_path / "m.gguf", tiny, skip=(Q_PROJ,)))


def test_damaged_gguf_files(tmp_path, tiny):
    whole = write_gguf(tmp_path / "m.gguf", tiny).read_bytes()
    path = tmp_path / "bad.gguf"
    for content, named in (
        (b"GGML" + whole[4:], "wrong magic"),
        (b"", "wrong magic"),
        (whole[:4] + b"\x09\0\0\0" + whole[8:], "version 9"),
        (whole[:-100], r"truncated: tensor \S+ ends"),
        (whole[:200], "damaged or truncated GGUF header"),
        (whole[:5], "damaged or truncated GGUF header"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=named):
            load_model_config(path)


def test_a_header_cut_anywhere_is_an_error_of_loading(tmp_path, tiny):
    whole = write_gguf(tmp_path / "m.gguf", tiny).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, 1500, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            load_model_config(path)
