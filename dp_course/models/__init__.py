"Which networks?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "blocks": """
        BasicBlock WideBlock cost_table linear_head norm_and_relu three_stages""",
    "cnns": """
        ACTIVATIONS TemperedSigmoid activation activation_norm allconv_cifar bounded_cnn
        digit_filters draw_like edge_filters first_moment papernot_cnn weight_statistics""",
    "report": """
        ReportBlock report_conv report_resnet20 report_wrn16_4""",
    "resnet": """
        WSConv2d four_a_group resnet20 sixteen_groups standardized_convolution wide_resnet
        wrn16_4 wrn40_4""",
    "unet": """
        UNet segment""",
})
