from ckptd.api import checkpoints as checkpoints
from ckptd.api import convert as convert
from ckptd.api import inspect as inspect
from ckptd.api import restore as restore
from ckptd.api import resume as resume
from ckptd.api import verify as verify

__version__: str
