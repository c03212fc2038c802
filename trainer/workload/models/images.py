"""Checks that examples are images, which convolutions need."""


def check_image_shape(model: str, input_shape: tuple[int, ...]) -> None:
    """Raises ValueError unless examples are images, [height, width, channels]."""
    if len(input_shape) != 3:
        raise ValueError(
            f"model {model} takes images of [height, width, channels], but the data has {list(input_shape)}; "
            "type model=mlp, which takes any shape, or give the data a shape of three sizes"
        )
