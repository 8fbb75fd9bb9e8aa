//! The output of results: tables for people, JSON for programs.
//!
//! Keys and names come from users of the pool. The output escapes them, so a key cannot move the cursor,
//! change a colour or forge a row.

mod plain;

pub(crate) use plain::{one_line, several_lines};

use bytesize::ByteSize;
use comfy_table::{CellAlignment, presets};
use kvpool_types::Causes;
use serde::Serialize;
use std::fmt;
use std::io::Write;
use std::ops::Range;

/// The format of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Tables for people.
    Table,
    /// One JSON value for programs.
    Json,
}

impl Format {
    /// Prints `value`: as JSON, or as the text that `table` returns.
    ///
    /// # Errors
    ///
    /// `value` has no JSON form, or standard output fails. A closed pipe is not an error.
    pub fn show<T: Serialize>(
        self,
        value: &T,
        table: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        let mut text = match self {
            Self::Json => plain::json(&serde_json::to_string_pretty(value)?),
            Self::Table => several_lines(&table(value)),
        };
        if !text.is_empty() {
            text.push('\n');
        }
        Ok(write(text.as_bytes())?)
    }
}

/// Writes `value` to standard output as JSON in one line. True unless the pipe is
/// closed.
pub(crate) fn write_json_line<T: Serialize>(value: &T) -> anyhow::Result<bool> {
    let text = plain::json(&serde_json::to_string(value)?) + "\n";
    Ok(has_reader(text.as_bytes())?)
}

/// Writes `text` and an empty line to standard output. True unless the pipe is closed.
pub(crate) fn write_text(text: &str) -> anyhow::Result<bool> {
    Ok(has_reader((several_lines(text) + "\n\n").as_bytes())?)
}

fn has_reader(bytes: &[u8]) -> std::io::Result<bool> {
    let mut output = std::io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true),
    }
}

/// Writes to standard output. A closed pipe is not an error.
pub(crate) fn write(bytes: &[u8]) -> std::io::Result<()> {
    // A reader that is gone has read enough, like `head`.
    has_reader(bytes).map(drop)
}

/// Writes to standard error why the program `name` failed. A closed standard error is ignored.
pub(crate) fn print_error(name: &str, error: &anyhow::Error) {
    let text = several_lines(&format!("{name}: {}\n", Causes(error.as_ref())));
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// A table. Its cells are escaped, so their text has no effect on a terminal.
#[derive(Debug)]
pub struct Table(comfy_table::Table);

impl Table {
    /// Names the columns.
    pub fn set_header(&mut self, header: impl IntoIterator<Item = impl AsRef<str>>) {
        self.0.set_header(cells(header));
    }

    /// Adds a row.
    pub fn add_row(&mut self, row: impl IntoIterator<Item = impl AsRef<str>>) {
        self.0.add_row(cells(row));
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn cells(texts: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<String> {
    texts
        .into_iter()
        .map(|text| one_line(text.as_ref()))
        .collect()
}

/// An empty table under `header`.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = facts();
    table.set_header(header);
    table
}

/// An empty table of two columns, name and value.
pub fn facts() -> Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    Table(table)
}

/// Aligns columns to the right. `table` must have its rows.
pub fn align_right(table: &mut Table, columns: Range<usize>) {
    for column in columns {
        if let Some(column) = table.0.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Formats bytes in binary units.
pub fn bytes(count: u64) -> String {
    ByteSize(count).display().iec().to_string()
}

/// The version of a daemon. A daemon of an early version does not tell it.
pub(crate) fn version(version: &str) -> &str {
    match version {
        "" => "unknown",
        version => version,
    }
}

/// Formats a number with its digits in groups of three.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a duration that is given in microseconds.
pub(crate) fn micros(micros: f64) -> String {
    if micros < 1e3 {
        format!("{micros:.0} µs")
    } else if micros < 1e6 {
        format!("{:.2} ms", micros / 1e3)
    } else {
        format!("{:.2} s", micros / 1e6)
    }
}

/// The JSON name of a value.
pub(crate) fn label<T: Serialize>(value: &T) -> String {
    serde_json::to_value(value)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        let shown = [0, 7, 999, 1_000, 12_345, 1_234_567].map(count);
        assert_eq!(shown, ["0", "7", "999", "1,000", "12,345", "1,234,567"]);
    }

    #[test]
    fn durations_choose_their_unit() {
        assert_eq!(micros(12.4), "12 µs");
        assert_eq!(micros(1_250.0), "1.25 ms");
        assert_eq!(micros(2_500_000.0), "2.50 s");
    }
}
