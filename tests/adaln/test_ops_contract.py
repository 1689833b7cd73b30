"""What do the ops accept, refuse and promise: layouts, dtypes, messages, which backend runs?"""

import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from adaptiveload_hf import UserError
from adaptiveload_hf.adaln import extension, ops, reference, registry
from adaptiveload_hf.adaln.schema_digest import MARK, schema_digest

x = torch.randn(2, 12, 8)
y = torch.randn(2, 12, 8)
BOTH = [ops, reference]


@pytest.mark.parametrize("module", BOTH, ids=["ops", "reference"])
@pytest.mark.parametrize("shape", [(2, 1, 4), (3, 1, 8), (2, 5, 8), (2, 0, 8), (2, 8)])
def test_a_modulation_of_another_shape_is_refused_with_both_shapes(module, shape):
    expected = "[B or 1, T, D] with B = 2, D = 8 and T = 1, S = 12 or a divisor of S for x of shape (2, 12, 8)"
    for name in ("scale", "shift"):
        with pytest.raises(UserError, match=re.escape(f"{name} must be {expected}, but it is {shape}")):
            module.layer_norm_modulate(x, **{name: torch.randn(shape)})
        with pytest.raises(UserError, match=name):
            module.rms_norm_modulate(x, **{name: torch.randn(shape)})
    with pytest.raises(UserError, match=re.escape(f"gate must be {expected}, but it is {shape}")):
        module.gate_residual(x, y, torch.randn(shape))
    with pytest.raises(UserError, match="gate must be"):
        module.gate_residual_layer_norm_modulate(x, y, torch.randn(shape))


@pytest.mark.parametrize("module", BOTH, ids=["ops", "reference"])
@pytest.mark.parametrize("name", ["weight", "bias", "scale_table", "shift_table"])
def test_columns_of_another_width_are_refused(module, name):
    with pytest.raises(UserError, match=re.escape(f"{name} must be [D] with D = 8")):
        module.layer_norm_modulate(x, **{name: torch.randn(4)})
    with pytest.raises(UserError, match=re.escape("gate_table must be [D] with D = 8")):
        module.gate_residual(x, y, gate_table=torch.randn(1, 8))


@pytest.mark.parametrize("module", BOTH, ids=["ops", "reference"])
def test_x_and_y_of_another_kind_are_refused(module):
    with pytest.raises(
        UserError, match=re.escape("x must be floating point and [B, S, D], but it is torch.float32 (12, 8)")
    ):
        module.layer_norm_modulate(x[0])
    with pytest.raises(UserError, match="int64"):
        module.rms_norm_modulate(x.long())
    with pytest.raises(
        UserError, match=re.escape("y must have the shape and device of x, (2, 12, 8) on cpu, but it is (2, 1, 8)")
    ):
        module.gate_residual(x, y[:, :1])
    with pytest.raises(
        UserError, match=r"scale must be floating point and on the device of x, cpu, but it is torch\.int64"
    ):
        module.layer_norm_modulate(x, torch.ones(2, 1, 8, dtype=torch.long))
    with pytest.raises(UserError, match="float32 on meta"):
        module.layer_norm_modulate(x, torch.ones(2, 1, 8, device="meta"))


@pytest.mark.parametrize("module", BOTH, ids=["ops", "reference"])
def test_rope_refuses_other_shapes_and_tables_with_gradients(module):
    weight, table = torch.ones(8), torch.ones(1, 12, 1, 4)
    with pytest.raises(UserError, match="heads must divide D = 8 into heads of even width, but heads is 3"):
        module.rms_norm_rope(x, weight, table, table, heads=3)
    with pytest.raises(UserError, match=re.escape("sin must be [B or 1, S, 1, D / heads] = [2 or 1, 12, 1, 4]")):
        module.rms_norm_rope(x, weight, table, table[..., :2], heads=2)
    with pytest.raises(UserError, match=re.escape("Pass cos.detach()")):
        module.rms_norm_rope(x, weight, table.clone().requires_grad_(), table, heads=2)
    with pytest.raises(UserError, match=re.escape("weight must be [D] = [8], or [D / heads] = [4]")):
        module.rms_norm_rope(x, weight[:3], table, table, heads=2)
    with pytest.raises(UserError, match="Without rotation and over all heads use rms_norm_modulate"):
        module.rms_norm_rope(x, weight, heads=2)
    with pytest.raises(UserError, match="cos is there and sin absent"):
        module.rms_norm_rope(x, weight[:4], table, heads=2)
    with pytest.raises(UserError, match=re.escape("cos must be [B or 1, S, 1, D / heads] = [2 or 1, 12, 1, 4]")):
        module.rms_norm_rope(x, weight, table[:, :5], table[:, :5], heads=2)
    with pytest.raises(UserError, match=re.escape("sin must be [B or 1, S, 1, D / heads] = [2 or 1, 5, 1, 4]")):
        module.rms_norm_rope(x, weight[:4], table[:, :5], table, heads=2)


def test_differentiating_a_raw_backward_op_is_refused_by_name():
    stats = torch.rand(2, 12, 2)
    args = (y.clone().requires_grad_(), x, stats, None, None, None, None, 1, torch.float32, torch.float32, 1)
    with pytest.raises(RuntimeError, match="layer_norm_modulate_backward is not differentiable"):
        torch.ops.adaptiveload.layer_norm_modulate_backward(*args)


@pytest.mark.parametrize("module", BOTH, ids=["ops", "reference"])
def test_the_default_output_dtype_is_what_eager_promotion_gives(module):
    half, scale, table = x.bfloat16(), torch.randn(2, 1, 8).bfloat16(), torch.randn(8)
    eager = F.layer_norm(half, (8,))
    assert module.layer_norm_modulate(half).dtype == eager.dtype
    assert module.layer_norm_modulate(half, scale).dtype == (eager * (1 + scale)).dtype
    assert module.layer_norm_modulate(half, scale, scale_table=table).dtype == (eager * (1 + scale + table)).dtype
    assert module.layer_norm_modulate(half, scale, out_dtype=torch.float16).dtype == torch.float16
    assert module.gate_residual(x, y.bfloat16(), scale).dtype == (x + y.bfloat16() * scale).dtype
    assert module.gate_residual(half, y.bfloat16(), scale.float()).dtype == torch.float32
    residual, normed = module.gate_residual_layer_norm_modulate(half, y.bfloat16(), scale.float())
    assert (residual.dtype, normed.dtype) == (torch.float32, torch.float32)
    residual, normed = module.gate_residual_layer_norm_modulate(
        half, y.bfloat16(), scale.float(), scale, residual_dtype=torch.bfloat16
    )
    assert (residual.dtype, normed.dtype) == (torch.bfloat16, torch.bfloat16)
    assert module.rms_norm_rope(half, table, *(torch.ones(1, 12, 1, 4),) * 2, heads=2).dtype == torch.bfloat16


@pytest.mark.parametrize("module", BOTH, ids=["ops", "reference"])
def test_statistics_of_the_fused_op_are_those_of_the_rounded_residual(module):
    half, gate = x.bfloat16(), torch.randn(2, 1, 8)
    options = {"residual_dtype": torch.bfloat16, "out_dtype": torch.float32}
    residual, normed = module.gate_residual_layer_norm_modulate(half, y.bfloat16(), gate, **options)
    torch.testing.assert_close(normed, F.layer_norm(residual.float(), (8,), eps=1e-6))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_frames_of_modulation_are_rows_of_consecutive_tokens(rows):
    scale = torch.randn(1, rows, 8)
    by_token = scale[:, [s * rows // 12 for s in range(12)]]
    expected = F.layer_norm(x, (8,), eps=1e-6) * (1 + by_token)
    torch.testing.assert_close(ops.layer_norm_modulate(x, scale), expected)


def test_scale_and_shift_may_have_different_numbers_of_rows():
    scale, shift = torch.randn(2, 3, 8, requires_grad=True), torch.randn(1, 4, 8, requires_grad=True)
    results = []
    for module in BOTH:
        out = module.layer_norm_modulate(x, scale, shift)
        results.append((out, *torch.autograd.grad(out.square().sum(), (scale, shift))))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (3, 4, 0)])
def test_empty_tensors_pass_through_with_gradients(shape):
    empty = torch.randn(shape, requires_grad=True)
    scale = torch.randn(shape[0], 1, shape[2], requires_grad=True)
    out = ops.layer_norm_modulate(empty, scale) + ops.gate_residual(empty, empty, scale)
    out.sum().backward()
    assert out.shape == shape and (scale.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_equals_the_attention_processor_of_wan(dtype):
    wan = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    torch.manual_seed(0)
    heads, attention = 4, wan.WanAttention(dim=64, heads=4, dim_head=16, eps=1e-6, processor=wan.WanAttnProcessor())
    rope = wan.WanRotaryPosEmbed(16, (1, 2, 2), 32)
    hidden = torch.randn(2, 16, 3, 4, 6)
    cos, sin = rope(hidden)
    tokens = torch.randn(2, cos.shape[1], 64).to(dtype)
    attention = attention.to(dtype)
    torch.nn.init.normal_(attention.norm_q.weight, 1.0, 0.2)
    seen = {}

    def keep(query, key, value, **_):
        seen["query"] = query
        return query

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wan, "dispatch_attention_fn", keep)
        attention(tokens, rotary_emb=(cos, sin))
    ours = ops.rms_norm_rope(attention.to_q(tokens), attention.norm_q.weight, cos, sin, heads=heads, eps=1e-6)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, seen["query"], **tolerance)


def test_without_cuda_every_op_runs_the_reference_and_the_reason_is_named():
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert ops.extension_missing_reason() == f"torch {torch.__version__} was built without CUDA"
    assert ops.kernel_backend("cpu") == "reference"
    assert ops.kernel_backend("cuda") == ("triton" if registry.has_triton else "reference")


def test_an_unknown_backend_of_an_op_is_refused():
    with pytest.raises(UserError, match="backend of an op must be auto or triton, but it is 'cuda'"):
        ops.layer_norm_modulate(torch.zeros(1, 1, 8), backend="cuda")


SCHEMAS = Path(ops.__file__).with_name("schemas.py")
DIGEST = schema_digest(SCHEMAS)


@pytest.mark.parametrize(
    "change", [("int heads, ", "int heads, int more, "), ("Tensor? y", "Tensor y"), ("-> Tensor[]", "-> Tensor")]
)
def test_the_word_for_the_schemas_changes_with_any_of_them_and_with_nothing_else(tmp_path, change):
    source, changed = SCHEMAS.read_text(), tmp_path / "schemas.py"
    changed.write_text(source + "# a comment\n\ndef more(x) -> int:\n    return 'text'\n")
    assert schema_digest(changed) == DIGEST
    assert change[0] in source
    changed.write_text(source.replace(*change, 1))
    assert schema_digest(changed) != DIGEST


@pytest.mark.parametrize(
    ("version", "cuda", "content", "reason"),
    [
        ("2.13.0", None, None, "torch 2.13.0 was built without CUDA"),
        ("2.10.1+cu128", "12.8", None, "torch 2.10.1+cu128 is too old for it: it needs 2.11"),
        ("2.12.0+cu130", "13.0", None, "not built: install with `pip install --no-build-isolation .`"),
        (
            "2.12.0+cu130",
            "13.0",
            MARK.encode() + b"another",
            "built for ops with other arguments, from another version; build",
        ),
        (
            "2.12.0+cu130",
            "13.0",
            b"of a version before",
            "built for ops with other arguments, from another version; build",
        ),
        ("2.12.0+cu130", "13.0", (MARK + DIGEST).encode(), "file too short); build it again with"),
    ],
)
def test_each_way_the_extension_can_be_missing_has_its_reason(monkeypatch, tmp_path, version, cuda, content, reason):
    if content is not None:
        (tmp_path / "_C.abi3.so").write_bytes(content)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert reason in extension.find_problem(tmp_path / "_C.abi3.so")


def test_an_extension_without_code_for_the_gpu_is_named_with_the_remedy(monkeypatch):
    class Namespace:
        device_error = staticmethod(lambda device: 209)

    monkeypatch.setattr(torch.ops, "adaptiveload", Namespace)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a new GPU")
    extension.device_problem.cache_clear()
    problem = extension.device_problem(0)
    extension.device_problem.cache_clear()
    assert "it holds no code for GPU 0, a new GPU (sm_100, CUDA error 209)" in problem
    assert "TORCH_CUDA_ARCH_LIST=10.0" in problem


@pytest.mark.parametrize(
    "code, kind, message",
    [
        (2, torch.OutOfMemoryError, "CUDA out of memory. No kernel of adaptiveload could be loaded on GPU 0"),
        (700, RuntimeError, "CUDA error 700 where its kernels were to be loaded on GPU 0"),
    ],
)
def test_any_other_error_of_the_gpu_is_raised_and_the_next_call_asks_again(monkeypatch, code, kind, message):
    class Namespace:
        device_error = staticmethod(lambda device: codes.pop())

    codes = [0, code]
    monkeypatch.setattr(torch.ops, "adaptiveload", Namespace)
    extension.device_problem.cache_clear()
    with pytest.raises(kind, match=message):
        extension.device_problem(0)
    assert extension.device_problem(0) is None
    extension.device_problem.cache_clear()


def test_importing_the_ops_starts_no_cuda_context():
    script = "import torch, adaptiveload_hf.adaln.ops; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_private_name_of_torch_that_the_package_stands_on_is_there():
    sources = Path(ops.__file__).parent.glob("*.py")
    private = {name for s in sources for name in re.findall(r"torch\._C(?:\.\w+)+|forward_ad\._\w+", s.read_text())}
    roots = {"torch": torch, "forward_ad": torch.autograd.forward_ad}
    missing = []
    for name in private:
        root, _, path = name.partition(".")
        try:
            operator.attrgetter(path)(roots[root])
        except AttributeError:
            missing.append(name)
    assert len(private) >= 8 and not missing, f"torch {torch.__version__} has no {missing} any more"
    assert hasattr(torch.autograd.Function, "_backward_cls")
