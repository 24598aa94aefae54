"""Which template is taken, what it may do, and how its errors read."""

import json
import sys
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from moh_jax.data import chat
from moh_jax.data.chat import render_chat
from tests.data import tiny_words

pytest.importorskip("transformers")

_USER = [{"role": "user", "content": "aA"}]


def _tokenizer(**files):
  tokenizer = tiny_words.tokenizer()
  tokenizer.files = {
    name.replace("__", "/")
    .replace("_jinja", ".jinja")
    .replace("_json", ".json"): (
      value if isinstance(value, str) else json.dumps(value)
    ).encode()
    for name, value in files.items()
  }
  return tokenizer


def _render(source, messages=_USER, **options):
  tokenizer = _tokenizer(chat_template_jinja=source)
  return render_chat(tokenizer, messages, **options)


class FindTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"chat_template_jinja": "x"},),
    ({"tokenizer_config_json": {"chat_template": "x"}},),
    ({"chat_template_json": {"chat_template": "x"}},),
    (
      {
        "tokenizer_config_json": {
          "chat_template": [
            {"name": "rag", "template": "y"},
            {"name": "default", "template": "x"},
          ]
        }
      },
    ),
    (
      {
        "chat_template_jinja": "x",
        "tokenizer_config_json": {"chat_template": "y"},
      },
    ),
  )
  def test_default_is_found(self, files):
    self.assertEqual(render_chat(_tokenizer(**files), _USER), "x")

  def test_others_have_names(self):
    tokenizer = _tokenizer(
      chat_template_jinja="x", additional_chat_templates__rag_jinja="y"
    )
    names = chat.template_names(tokenizer)
    self.assertEqual(names, ("default", "rag"))
    self.assertEqual(render_chat(tokenizer, _USER, "rag"), "y")
    with self.assertRaisesRegex(ValueError, r"'tool' must be one of .*'rag'"):
      render_chat(tokenizer, _USER, "tool")

  @parameterized.parameters((3,), ([1],), ({"default": 3},))
  def test_wrong_type_names_the_file(self, stored):
    tokenizer = _tokenizer(tokenizer_config_json={"chat_template": stored})
    with self.assertRaisesRegex(ValueError, "tokenizer_config.json: chat_temp"):
      render_chat(tokenizer, _USER)

  @parameterized.parameters("jinja2", "transformers")
  def test_missing_library_says_how_to_install_it(self, name):
    missing = {n: None for n in sys.modules if n.partition(".")[0] == name}
    with (
      mock.patch.dict(sys.modules, {**missing, name: None}),
      self.assertRaisesRegex(ValueError, rf"'{name}': pip install 'moh_jax"),
    ):
      _render("x")


class RenderTest(parameterized.TestCase):
  @parameterized.parameters(
    "{{ messages.append(1) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.__base__ | attr('__subclasses__')() }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
  )
  def test_templates_cannot_leave_the_sandbox(self, source):
    with self.assertRaisesRegex(ValueError, "chat_template.jinja fails: Sec"):
      _render(source)

  @parameterized.parameters(
    ("{{ raise_exception('no\nway') }}", "refuses the messages: no way"),
    ("{{ messages[0].content + 1 }}", "fails: TypeError: "),
    ("{{ 1 / 0 }}", "fails: ZeroDivisionError: "),
    ("{{ nobody.is.here }}", "fails: UndefinedError: "),
    ("a\n{% if %}", "line 2: "),
    ("{% end %}", "line 1: "),
    ("{% include 'x' %}", "fails: "),
  )
  def test_errors_are_one_line_that_names_the_file(self, source, message):
    with self.assertRaises(ValueError) as caught:
      _render(source)
    text = str(caught.exception)
    self.assertStartsWith(text, "chat_template.jinja")
    self.assertIn(message, text)
    self.assertNotIn("\n", text)

  @parameterized.parameters(
    ("aA", "messages='aA' must be a list"),
    ([], r"messages=\[\] must be a list, and not empty"),
    (["aA"], "message 0: must be 'object', not str"),
    ([{"role": 1, "content": ""}], "message 0: role=1 must be 'str'"),
    ([*_USER, {"content": ""}], "message 1: has no entry 'role'"),
    (
      [{"role": "user", "content": 1}],
      "message 0: content=1 must be 'str . array",
    ),
  )
  def test_bad_messages_are_named(self, messages, message):
    with self.assertRaisesRegex(ValueError, message):
      _render("x", messages)


if __name__ == "__main__":
  absltest.main()
