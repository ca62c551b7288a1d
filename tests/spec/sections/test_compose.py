"""The `compose` section of a cluster file."""

import pytest
from pydantic import ValidationError

from tfdist_cli.spec.sections.compose import Compose


@pytest.mark.parametrize("image", ["", "-rm", "a b", "ü"])
def test_no_image(image):
    with pytest.raises(ValidationError) as caught:
        Compose(image=image)
    assert [details["ctx"]["error"].code for details in caught.value.errors()] == ["invalid-image"]


@pytest.mark.parametrize("volume", ["/a:/b", "/a:/b:ro", "/with space:/b"])
def test_volumes(volume):
    assert Compose(volumes=[volume]).volumes == [volume]


@pytest.mark.parametrize("volume", ["/a", "a:/b", "/a:b", "/a:/b:rw,z", "/a:/b:", "/a:/b:ro:ro", "/a\n:/b"])
def test_no_volume(volume):
    with pytest.raises(ValidationError) as caught:
        Compose(volumes=[volume])
    assert [details["ctx"]["error"].code for details in caught.value.errors()] == ["invalid-volume"]
