"""The flags of the original's logging library. All commands of the original have them."""

from __future__ import annotations

from mooncake.commands.flags import Flag, Value

_KINDS: dict[str, tuple[tuple[str, Value], ...]] = {
    "bool": (
        ("logtostderr", False),
        ("logtostdout", False),
        ("alsologtostderr", False),
        ("colorlogtostderr", False),
        ("colorlogtostdout", False),
        ("drop_log_memory", True),
        ("log_prefix", True),
        ("log_utc_time", False),
        ("log_year_in_prefix", True),
        ("stop_logging_if_full_disk", False),
        ("symbolize_stacktrace", True),
        ("timestamp_in_logfile_name", True),
    ),
    "int32": (
        ("logbuflevel", 0),
        ("logbufsecs", 30),
        ("logemaillevel", 999),
        ("logfile_mode", 436),
        ("minloglevel", 0),
        ("stderrthreshold", 2),
        ("v", 0),
    ),
    "uint32": (("logcleansecs", 300), ("max_log_size", 1800)),
    "string": (
        ("alsologtoemail", ""),
        ("log_backtrace_at", ""),
        ("log_dir", ""),
        ("log_link", ""),
        ("logmailer", ""),
        ("vmodule", ""),
    ),
}


def logging_flags(command: str) -> tuple[Flag, ...]:
    """Returns the flags, for the command that runs instead of the original's."""
    why = f"{command} logs to stderr; RUST_LOG sets how much"
    return tuple(
        Flag(name, kind, default, "", why) for kind, named in _KINDS.items() for name, default in named
    )
