"""The options of tools.py. No torch, so that --help and a mistake cost no seconds."""

import argparse

from nanorchestra.errors import ArgumentParser

KINDS = ("flat", "ivfpq")  # of nanorchestra/tools/vectors.py


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. UserError."""
    parser = ArgumentParser(prog="tools.py", description="What search needs.")
    commands = parser.add_subparsers(required=True, dest="command")
    index = commands.add_parser("index", help="index a corpus")
    index.add_argument("path", help="a directory of texts, or a JSONL file")
    index.add_argument("--out", required=True, help="the directory of the index")
    index.add_argument("--embed", metavar="CHECKPOINT", help="index vectors of Qwen3-Embedding")
    index.add_argument(
        "--kind", choices=KINDS, help="of FAISS (default: flat for up to 4 GiB of vectors)"
    )
    serve = commands.add_parser("serve-index", help="answer searches over HTTP")
    serve.add_argument("path", help="the directory of an index, or a small JSONL file")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8100, help="(default: 8100)")
    serve.add_argument("--device", help="cpu or cuda:N (default: the first GPU, if there is one)")
    serve.add_argument(
        "--embed", metavar="CHECKPOINT", help="where the index's Qwen3-Embedding lies here"
    )
    return parser.parse_args(arguments)
