"""The one error of loading a model. Knows nothing of file formats."""

from core.errors import ErrorCode, TandemError


class ModelLoadError(TandemError):
    """The files do not make a model that this engine can run. The message names the file and what is wrong."""

    code = ErrorCode.ENGINE
