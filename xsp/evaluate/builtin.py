"""The built-in set: manifests of models that this machine can build from a seed, each under three loads.

The sizes suit a machine without an accelerator: small networks for images, and language models of two layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from xsp import modelname
from xsp.evaluate.manifest import Dataset, Manifest, Model, Scenario, Software

TORCHVISION = (
    "alexnet", "squeezenet1_0", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large",
    "mnasnet0_5", "mnasnet1_0", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "resnet18", "resnet34", "resnet50",
    "densenet121", "efficientnet_b0", "regnet_x_400mf", "regnet_y_400mf", "vgg11", "convnext_tiny",
)  # fmt: skip
TIMM = (
    "resnet10t", "resnet14t", "mobilenetv3_small_050", "mobilenetv3_small_075", "mobilenetv3_small_100",
    "tf_efficientnet_lite0", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "ghostnet_050",
    "lcnet_050", "lcnet_075", "lcnet_100", "tinynet_d", "tinynet_e", "edgenext_xx_small", "mobilevit_xxs",
    "convnext_atto", "poolformer_s12",
)  # fmt: skip
TRANSFORMERS = (
    "bert?num_hidden_layers=2&hidden_size=128&num_attention_heads=2&intermediate_size=512",
    "distilbert?n_layers=2&dim=128&n_heads=2&hidden_dim=512",
    "roberta?num_hidden_layers=2&hidden_size=128&num_attention_heads=2&intermediate_size=512",
    "electra?num_hidden_layers=2&hidden_size=128&num_attention_heads=2&intermediate_size=512",
    "gpt2?n_layer=2&n_embd=128&n_head=2",
    "llama?num_hidden_layers=2&hidden_size=128&num_attention_heads=2&num_key_value_heads=2&intermediate_size=512"
    "&vocab_size=8000",
)

BATCHES = [1, 2, 4, 8, 16, 32, 64]

SCENARIOS = {
    "online": Scenario(kind="online", requests=30, warmup=3),
    "batched": Scenario(kind="batched", batches=BATCHES, requests=3, warmup=1),
    "poisson": Scenario(kind="poisson", rate=4.0, requests=30, warmup=3),
}


def manifests() -> Iterator[Manifest]:
    """Yield a manifest for each model and load; those of a model follow each other."""
    sources = [
        *((f"torchvision:{name}", "image-classification") for name in TORCHVISION),
        *((f"timm:{name}", "image-classification") for name in TIMM),
        *((f"transformers:{name}", "language-model") for name in TRANSFORMERS),
    ]
    for source, task in sources:
        parsed = modelname.parse(source)
        library, architecture = parsed.source, parsed.name
        model = Model(name=architecture, version="1.0.0", task=task, source=source, sequence=64)
        software = Software(packages={library: "", "torch": ""}, threads=1)
        for kind, scenario in SCENARIOS.items():
            yield Manifest(
                name=f"{library}-{architecture}-{kind}", model=model, software=software, dataset=Dataset(samples=16),
                scenario=scenario,
            )  # fmt: skip
