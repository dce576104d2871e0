"""Converted image models against stock ones: values, gradients, running statistics, saved bytes, and revert.

Eight need no further packages. Models of timm and diffusers, where these are installed, run in `make test-all`.
"""

import copy
import warnings

import pytest
import ranks
import torch

import hfnn
from hfnn import adapters, memory, testing

DRAWS = 3  # a tensor breaks the accuracy rule if it does so for this many draws of the inputs

# The packages may warn that images are smaller than intended.
pytestmark = pytest.mark.filterwarnings("default")


def wrong(model, draw) -> dict:
    """Tensors that break the accuracy rule for every draw."""
    found = None
    for number in range(DRAWS):
        torch.manual_seed(number)
        rows = hfnn.verify(model, **draw()).rows
        bad = {row.name: f"{row.converted.l2:.1e}, torch's {row.original.l2:.1e}" for row in rows if not row.ok}
        found = bad if found is None else {name: why for name, why in found.items() if name in bad}
        if not found:
            break
    return found


def look(model) -> list:
    return [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]


def floats(nest) -> list:
    if isinstance(nest, torch.Tensor):
        return [nest] if nest.is_floating_point() else []
    values = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, (list, tuple)) else ()
    return [t for value in values for t in floats(value)]


def same_statistics(ours, stock, model, given) -> None:
    """Compares the batch norms' buffers after a call with float64. The bound is torch's largest error."""
    exact = adapters.widened(copy.deepcopy(model).train(stock.training), torch.float64)
    exact(**{name: t.double() if floats(t) else t for name, t in given.items()})
    found = [dict(m.named_buffers()) for m in (ours, stock, exact)]
    names = [name for name, t in found[1].items() if t.is_floating_point()]
    assert all(torch.equal(found[0][name], t) for name, t in found[1].items() if name not in names)
    errors = [{name: testing.error(f[name], found[2][name]).l2 for name in names} for f in found[:2]]
    yardstick = max([*errors[1].values(), torch.finfo(torch.float32).eps])
    assert {name: off for name, off in errors[0].items() if off > testing.OUTPUTS * yardstick} == {}


def check(model, draw, modes=(True, False)) -> None:
    """draw() returns the arguments of a call. modes: values of `training`."""
    before, state = look(model), copy.deepcopy(model.state_dict())
    for mode in modes:
        stock = copy.deepcopy(model).train(mode)
        ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
        assert any(row.to is not None for row in hfnn.report(ours).rows)
        assert wrong(ours, draw) == {}
        given = draw()
        kept = [memory.saved_bytes(lambda m=m, given=given: m(**given)).total for m in (ours, stock)]
        assert kept[0] <= kept[1]
        same_statistics(ours, stock, model, given)  # after the call whose bytes were counted
        hfnn.revert(ours)
        assert look(ours) == [(name, cls, names) for (name, cls, names) in before]
        ours.load_state_dict(stock.state_dict())
        torch.manual_seed(0)
        mine = floats(ours.eval()(**given))
        torch.manual_seed(0)
        for y, want in zip(mine, floats(stock.eval()(**given)), strict=True):
            assert torch.equal(y, want)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in state.items())


def quiet(build):
    """A model without dropout, because the two versions draw different numbers."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


@pytest.mark.parametrize("arch", ["resnet", "vit"])
def test_examples(examples, arch):
    images = ranks.loaded(examples / "images.py")
    sizes = {"resnet": lambda: images.ResNet(1, 8, 5), "vit": lambda: images.ViT(2, 16, 2, 16, 0.0, 5)}
    model = quiet(sizes[arch])
    check(model, lambda: {"x": torch.randn(4, 3, 16, 16)})


OF_TRANSFORMERS = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 8},
    "ConvNext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "MobileNetV2": {"depth_multiplier": 0.1},
    "Swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 32},
    "PoolFormer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers(examples, name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**OF_TRANSFORMERS[name], num_labels=5)
    model = quiet(lambda: getattr(transformers, f"{name}ForImageClassification")(config))
    check(model, lambda: {"pixel_values": torch.randn(4, 3, 32, 32)})


# timm names: of 42 families the smallest that take images of 32 x 32.
OF_TIMM = (
    "resnet18",
    "resnetv2_50",
    "resnext26ts",
    "regnety_002",
    "densenet121",
    "mobilenetv2_035",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small_035",
    "efficientnet_b0",
    "tf_efficientnetv2_b0",
    "convnext_atto",
    "convnextv2_atto",
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "cait_xxs24_224",
    "eva02_tiny_patch14_224",
    "swin_tiny_patch4_window7_224",
    "coat_lite_tiny",
    "mixer_s32_224",
    "resmlp_12_224",
    "gmlp_ti16_224",
    "poolformer_s12",
    "caformer_s18",
    "pvt_v2_b0",
    "twins_svt_small",
    "levit_128s",
    "mobilevit_xxs",
    "edgenext_xx_small",
    "fastvit_t8",
    "ghostnet_050",
    "mnasnet_small",
    "res2net50_26w_4s",
    "seresnet18",
    "cspresnet50",
    "nfnet_l0",
    "repvgg_a0",
    "ese_vovnet19b_dw",
    "maxvit_rmlp_pico_rw_256",
    "coatnet_pico_rw_224",
    "davit_tiny",
    "hgnetv2_b0",
    "sequencer2d_s",
)


@pytest.fixture(scope="module")
def timm(examples):
    return pytest.importorskip("timm")


# At 32 x 32 the attention of some sees one position, so the gradient of its bias is 0 or rounding noise. GhostNet's
# norms see four numbers per channel, and torch's own gradients are off by a thousandth.
LARGER = ("maxvit_rmlp_pico_rw_256", "coatnet_pico_rw_224", "ghostnet_050")


@pytest.mark.rest
@pytest.mark.parametrize("name", OF_TIMM)
def test_timm(timm, name):
    size = 64 if name in LARGER else 32

    def build():
        how = {"pretrained": False, "num_classes": 5, "drop_rate": 0.0}
        try:
            return timm.create_model(name, img_size=size, **how)
        except TypeError:  # a model that takes any size
            return timm.create_model(name, **how)

    # In eval Levit keeps its biases between calls, with their graph, so only one backward works.
    modes = (True,) if name.startswith("levit") else (True, False)
    check(quiet(build), lambda: {"x": torch.randn(4, 3, size, size)}, modes)


_BLOCKS = {"block_out_channels": (16, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}
_NOISY = lambda channels: torch.randn(2, channels, 16, 16)  # noqa: E731
# The class, its config, the arguments of a call.
OF_DIFFUSERS = {
    "UNet2DModel": (
        _BLOCKS
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        lambda: {"sample": _NOISY(3), "timestep": torch.tensor([3, 7])},
    ),
    "UNet2DConditionModel": (
        _BLOCKS
        | {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
        },
        lambda: {
            "sample": _NOISY(4),
            "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(2, 5, 16),
        },
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16}
        | {"in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
        lambda: {"hidden_states": _NOISY(4), "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])},
    ),
    "AutoencoderKL": (
        _BLOCKS
        | {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
        },
        lambda: {"sample": _NOISY(3), "sample_posterior": False},
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", OF_DIFFUSERS)
def test_diffusers(examples, name):
    diffusers = pytest.importorskip("diffusers")
    config, draw = OF_DIFFUSERS[name]
    check(quiet(lambda: getattr(diffusers, name)(**config)), draw)
