//! What an exit code means, and which one an error leads to.

use std::process::ExitCode;

/// All of it, for `--help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0    done
  1    failed; the message says why
  2    the command line is wrong
  3    a key is not in the pool
  4    the pool cannot be reached
  5    bytes came back that are not those that were put
  130  interrupted";

const FAILED: u8 = 1;
const MISSING: u8 = 3;
const UNREACHABLE: u8 = 4;
const WRONG_BYTES: u8 = 5;

/// The exit code of a command that was interrupted, as shells number it.
pub(crate) const INTERRUPTED: u8 = 130;

/// A key is not in the pool.
#[derive(Debug, thiserror::Error)]
#[error("not in the pool: {0}")]
pub(crate) struct Missing(pub(crate) String);

/// The pool cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unreachable(pub(crate) String);

/// Bytes came back that are not those that were put.
#[derive(Debug, thiserror::Error)]
#[error("{blocks} blocks came back with wrong bytes")]
pub(crate) struct WrongBytes {
    /// How many blocks.
    pub(crate) blocks: u64,
}

/// The exit code that `error` leads to.
pub(crate) fn code(error: &anyhow::Error) -> ExitCode {
    let code = if error.is::<WrongBytes>() {
        WRONG_BYTES
    } else if error.is::<Missing>() {
        MISSING
    } else if error.is::<Unreachable>() {
        UNREACHABLE
    } else {
        FAILED
    };
    ExitCode::from(code)
}
