"""Which domain a name stands for: one of ours, or the last class derived from `tools.Domain` in a Python file."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path

from chat import UserError
from tools import Domain

NAMES = "shop", "retail", "airline", "telecom"


def absolute(name: str) -> str:
    """A file's name as an absolute path; other names as they are."""
    return str(Path(name).resolve()) if name.endswith(".py") else name


def find(name: str) -> type[Domain]:
    """The domain's class. Errors: UserError."""
    if name in NAMES:
        module = importlib.import_module(f"domains.{name}")
    elif name.endswith(".py"):
        module = load(Path(absolute(name)))
    else:
        raise UserError(f"--domain {name}: choose one of {', '.join(NAMES)}, or a file FILE.py (docs/domains.md)")
    own = lambda value: inspect.isclass(value) and issubclass(value, Domain) and value.__module__ == module.__name__
    found = [value for value in vars(module).values() if own(value)]
    if not found:
        raise UserError(f"--domain {name}: holds no class derived from tools.Domain; see docs/domains.md")
    if lacking := sorted(found[-1].__abstractmethods__):
        raise UserError(f"--domain {name}: {found[-1].__name__} has no {', '.join(lacking)}; see docs/domains.md")
    return found[-1]


def load(path: Path):
    """A file as a module, once. Files beside it can be imported. Errors: UserError with the line where it breaks."""
    if not path.is_file():
        raise UserError(f"--domain {path}: there is no such file")
    if (name := str(path)) not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        sys.path.append(str(path.parent))  # last: it hides none of our files
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            where = traceback.extract_tb(error.__traceback__)[-1].lineno
            line = error.lineno if isinstance(error, SyntaxError) else where
            raise UserError(f"--domain {path}: line {line}: {type(error).__name__}: {error}") from None
    return sys.modules[name]
