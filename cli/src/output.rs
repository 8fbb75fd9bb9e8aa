//! How results are shown: tables for people, JSON for programs.
//!
//! Keys and names come from whoever uses the pool. What is shown of them moves no cursor, changes no
//! colour and forges no row ([`plain`]).

mod plain;

pub(crate) use plain::{one_line, several_lines};

use bytesize::ByteSize;
use comfy_table::{CellAlignment, presets};
use serde::Serialize;
use std::fmt;
use std::io::Write;
use std::ops::Range;

/// What results are shown as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Tables for people.
    Table,
    /// One JSON value for programs.
    Json,
}

impl Format {
    /// Shows `value`: as JSON, or as the text that `table` makes of it.
    pub(crate) fn show<T: Serialize>(
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

/// Writes to standard output as far as anybody reads.
pub(crate) fn write(bytes: &[u8]) -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        // Whoever reads has read enough, like `head`.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Says on standard error why the command failed. Nobody may be there to read it.
pub(crate) fn complain(error: &anyhow::Error) {
    let text = several_lines(&format!("kvctl: {error:#}\n"));
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// A table. What its cells hold is shown and does nothing to a terminal.
#[derive(Debug)]
pub(crate) struct Table(comfy_table::Table);

impl Table {
    /// Names the columns.
    pub(crate) fn set_header(&mut self, header: impl IntoIterator<Item = impl AsRef<str>>) {
        self.0.set_header(cells(header));
    }

    /// Adds a row.
    pub(crate) fn add_row(&mut self, row: impl IntoIterator<Item = impl AsRef<str>>) {
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
pub(crate) fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = facts();
    table.set_header(header);
    table
}

/// An empty table of two columns, what and how much.
pub(crate) fn facts() -> Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    Table(table)
}

/// Aligns the columns of numbers in `table`, which has its rows.
pub(crate) fn align_right(table: &mut Table, columns: Range<usize>) {
    for column in columns {
        if let Some(column) = table.0.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Bytes for people, in binary units.
pub(crate) fn bytes(count: u64) -> String {
    ByteSize(count).display().iec().to_string()
}

/// A number for people, its digits grouped.
pub(crate) fn count(number: u64) -> String {
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

/// A duration in microseconds for people.
pub(crate) fn micros(micros: f64) -> String {
    if micros < 1e3 {
        format!("{micros:.0} µs")
    } else if micros < 1e6 {
        format!("{:.2} ms", micros / 1e3)
    } else {
        format!("{:.2} s", micros / 1e6)
    }
}

/// The name that a value has in JSON.
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
