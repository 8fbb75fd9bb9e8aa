//! The options of every command: the format of the results, and the connection to the pool.

use crate::connection::Connection;
use crate::output::Format;

/// The options of every command.
#[derive(Debug, clap::Args)]
pub struct Context {
    /// Format of the results
    #[arg(long, global = true, value_enum, default_value_t = Format::Table)]
    pub output: Format,
    /// The pool, and how to connect to it.
    #[command(flatten)]
    pub connection: Connection,
}
