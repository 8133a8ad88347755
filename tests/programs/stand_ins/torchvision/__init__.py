"""Stand-in for torchvision, of which DeepSpeedExamples' pipeline needs a data set, four transforms and two models.

Its images are small and of noise, and AlexNet has few channels. The example also selects a GPU, which the test has not.
"""

from __future__ import annotations

import torch

from torchvision import datasets as datasets
from torchvision import models as models
from torchvision import transforms as transforms

if not torch.cuda.is_available():
    torch.cuda.set_device = lambda device: None
