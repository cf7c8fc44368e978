"Which networks?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "networks": """
        ACTIVATIONS BasicBlock TemperedSigmoid WideBlock activation allconv_cifar cost_table
        norm_and_relu papernot_cnn three_stages""",
    "resnet": """
        WSConv2d four_a_group resnet20 sixteen_groups wide_resnet wrn16_4 wrn40_4""",
    "small": """
        NormWatch activation_norm draw_like first_moment two_convolutions weight_statistics""",
    "unet": """
        UNet""",
})
