//! The text files that git tracks.

use crate::cargo::root;
use anyhow::{Context, Result, bail};
use std::fmt;
use std::process::Command;

/// File name extensions of the files that the checks read.
const EXTENSIONS: [&str; 10] = [
    "md", "rs", "py", "pyi", "toml", "sh", "proto", "yaml", "yml", "tpl",
];

/// Tracked text files with their paths from the root, in the order of git.
pub(super) struct Files(Vec<(String, String)>);

/// A line of a file.
pub(super) struct Line<'a> {
    file: &'a str,
    number: usize,
    pub(super) text: &'a str,
}

/// A finding of a check, and its place.
pub(super) struct Finding {
    /// The path from the root.
    pub(super) file: String,
    pub(super) line: usize,
    pub(super) what: String,
}

impl Files {
    pub(super) fn read() -> Result<Self> {
        let mut git = Command::new("git");
        git.args(["ls-files", "-z"]).current_dir(root());
        let listed = git.output().context("cannot run git")?;
        if !listed.status.success() {
            bail!("git ls-files failed: the checks of the text need a git checkout");
        }
        let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
        let mut files = Vec::new();
        for name in names.split('\0').filter(|name| is_text(name)) {
            let path = root().join(name);
            // A file that was deleted and not yet committed is still listed.
            if path.is_file() {
                let text = std::fs::read_to_string(&path);
                files.push((name.to_owned(), text.with_context(|| name.to_owned())?));
            }
        }
        Ok(Self(files))
    }

    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let owned = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
        Self(files.iter().map(owned).collect())
    }

    pub(super) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.iter().flat_map(|(file, text)| {
            let lines = (1..).zip(text.lines());
            lines.map(move |(number, text)| Line { file, number, text })
        })
    }

    /// Paths and texts.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let files = self.0.iter();
        files.map(|(file, text)| (file.as_str(), text.as_str()))
    }
}

impl Line<'_> {
    pub(super) fn is_in(&self, extension: &str) -> bool {
        extension_of(self.file) == extension
    }

    pub(super) fn finding(&self, what: impl Into<String>) -> Finding {
        Finding {
            file: self.file.to_owned(),
            line: self.number,
            what: what.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

pub(super) fn extension_of(file: &str) -> &str {
    file.rsplit_once('.').map_or("", |(_, extension)| extension)
}

/// Whether people wrote the file, and in a language that the checks know.
fn is_text(file: &str) -> bool {
    EXTENSIONS.contains(&extension_of(file)) && !file.contains("/generated/")
}
