from pathlib import Path

import mypkg
import torch

mypkg.scale(torch.ones(1000), 0.5)
artifacts, info = torch.compiler.save_cache_artifacts()
Path("artifacts").write_bytes(artifacts)
