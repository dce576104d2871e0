"""Collectives of hfreduce: which algorithm runs for a message, and which is fastest on this machine.

hfreduce explain all_reduce 4194304 --ranks 8
hfreduce tune --ranks 4
"""

import sys

from haiprof.command import Parser, run
from hfreduce import plan, tune


def explain(args) -> None:
    print(plan.explain(args.op, args.nbytes, ranks=args.ranks, hosts=args.hosts, device=args.device, peers=args.peers))


def parser() -> Parser:
    found = Parser(prog="hfreduce", description=__doc__)
    commands = found.add_subparsers(metavar="COMMAND", required=True)
    sub = commands.add_parser("explain", help="which algorithm a collective runs, and why")
    sub.add_argument("op", metavar="OP", choices=plan.KINDS[:-2], help=", ".join(plan.KINDS[:-2]))
    sub.add_argument("nbytes", metavar="BYTES", type=int, help="size of the whole message")
    sub.add_argument("--ranks", type=int, help="default: from the launcher's environment, else one per core")
    sub.add_argument("--hosts", type=int)
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    sub.add_argument(
        "--no-peers", dest="peers", action="store_false", help="GPUs without access to each other's memory"
    )
    sub.set_defaults(call=explain)
    about, _, more = tune.__doc__.partition("\n\n")
    sub = commands.add_parser("tune", help=about.rstrip("."), description=f"{about}\n\n{more}")
    tune.options(sub)
    sub.set_defaults(call=lambda args: tune.run(tune.checked(sub, args), args.given[1:]))
    return found


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(given)
    args.given = given
    return run("hfreduce", lambda: args.call(args), (RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
