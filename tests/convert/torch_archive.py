"""Archives as `torch.save` writes them, without torch."""

import pickle
import zipfile


class Code(bytes):
  """Pickle opcodes that leave one object on the stack."""


def code(value):
  """Pickles, with `Code` inside dicts and tuples taken as it is."""
  if isinstance(value, Code):
    return value
  if isinstance(value, dict):
    parts = [code(part) for item in value.items() for part in item]
    return b"}(" + b"".join(parts) + b"u"
  if isinstance(value, tuple):
    return b"(" + b"".join(map(code, value)) + b"t"
  return pickle.dumps(value, 2)[2:-1]


def find_global(name):
  return Code("c{}\n{}\n".format(*name.rsplit(".", 1)).encode())


def call(name, *args, state=None):
  build = b"" if state is None else code(state) + b"b"
  return Code(find_global(name) + code(args) + b"R" + build)


def storage(key, kind, size):
  """What `torch.save` writes for a storage."""
  return Code(code(("storage", find_global(kind), key, "cpu", size)) + b"Q")


def tensor(key, shape, strides, offset=0, *, size=6, kind="torch.FloatStorage"):
  """What `torch.save` writes for a tensor."""
  hooks = call("collections.OrderedDict")
  args = (storage(key, kind, size), offset, shape, strides, False, hooks)
  return call("torch._utils._rebuild_tensor_v2", *args)


def save_archive(path, tree, records, byteorder=b"little"):
  """Writes an archive as `torch.save` does."""
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("net/data.pkl", b"\x80\x02" + code(tree) + b".")
    archive.writestr("net/version", b"3")
    archive.writestr("net/byteorder", byteorder)
    for key, data in records.items():
      archive.writestr(f"net/data/{key}", bytes(data))
