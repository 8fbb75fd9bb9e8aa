//! The licences of the crates in a release, with their texts.
//!
//! A binary release must carry the notices of the crates that it contains. Each text stands once, after the list of
//! the files that have it.

use super::crates::Crate;
use crate::cargo::root;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// How the names of licence files begin, in capitals.
const NAMES: [&str; 6] = [
    "LICENSE",
    "LICENCE",
    "COPYING",
    "COPYRIGHT",
    "NOTICE",
    "UNLICENSE",
];

/// Writes the licences of the crates that are not ours.
pub(super) fn write(crates: &[Crate], path: &Path) -> Result<()> {
    Ok(std::fs::write(path, report(crates)?)?)
}

fn report(crates: &[Crate]) -> Result<String> {
    let theirs: Vec<_> = crates.iter().filter(|one| !one.is_ours()).collect();
    let mut report = String::from(
        "Licences of the third-party code in kvpool's programs and wheel\n\n\
         kvpool itself has the licence Apache-2.0, in the file LICENSE.\n\
         The programs also contain Rust's standard library: MIT OR Apache-2.0, the Rust Project contributors.\n\n\
         Crates:\n\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for one in &theirs {
        writeln!(report, "{} {}: {}", one.name, one.version, one.licence)?;
        for (file, text) in texts_of(one, &theirs)? {
            texts
                .entry(text)
                .or_default()
                .push(format!("{} {}: {file}", one.name, one.version));
        }
    }
    let mut texts: Vec<_> = texts.into_iter().map(|(text, of)| (of, text)).collect();
    texts.sort();
    for (of, text) in texts {
        let line = "-".repeat(100);
        write!(report, "\n{line}\n{}\n{line}\n\n{text}\n", of.join("\n"))?;
    }
    Ok(report)
}

/// The names and texts of a crate's licence files.
fn texts_of(one: &Crate, all: &[&Crate]) -> Result<Vec<(String, String)>> {
    let mut files = files_in(&one.directory)?;
    files.extend(
        one.licence_file
            .clone()
            .filter(|file| !files.contains(file)),
    );
    if files.is_empty() {
        files = borrowed(one, all)?;
    }
    let texts = files.iter().map(|file| {
        let text =
            std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let text = String::from_utf8_lossy(&text).replace('\r', "");
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        Ok((name.into_owned(), text.trim_end().to_owned()))
    });
    texts.collect()
}

/// The text for a crate without a licence file: that of another crate of the same repository, or Apache-2.0, whose
/// text is always the same.
fn borrowed(one: &Crate, all: &[&Crate]) -> Result<Vec<PathBuf>> {
    let same = |other: &&&Crate| {
        !one.repository.is_empty()
            && other.repository == one.repository
            && other.licence == one.licence
    };
    for other in all.iter().filter(same) {
        let files = files_in(&other.directory)?;
        if !files.is_empty() {
            return Ok(files);
        }
    }
    // Only where the text suffices: `MIT OR Apache-2.0`, but not `MIT AND Apache-2.0`.
    if one
        .licence
        .split(" OR ")
        .any(|choice| choice.trim() == "Apache-2.0")
    {
        return Ok(vec![root().join("LICENSE")]);
    }
    bail!(
        "{} {} ({}) has no licence text to ship",
        one.name,
        one.version,
        one.licence
    )
}

fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory);
    let entries = entries.with_context(|| format!("cannot read {}", directory.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .to_uppercase();
        // Some crates have a Rust module with such a name.
        let is_text = NAMES.iter().any(|start| name.starts_with(start)) && !name.ends_with(".RS");
        if is_text && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::crates::{PROGRAMS, compiled_into};

    #[test]
    fn each_crate_of_a_release_has_a_licence_and_a_text() {
        let crates = compiled_into(&PROGRAMS, "x86_64-unknown-linux-gnu").unwrap();
        let report = report(&crates).unwrap();
        for one in crates.iter().filter(|one| !one.is_ours()) {
            assert!(!one.licence.is_empty(), "{} names no licence", one.name);
            let listed = format!("{} {}: {}", one.name, one.version, one.licence);
            assert!(report.contains(&listed), "{listed}");
            // A second file may only point to the first.
            let texts = texts_of(one, &crates.iter().collect::<Vec<_>>()).unwrap();
            let is_whole = |text: &str| text.len() > 500;
            assert!(texts.iter().any(|(_, text)| is_whole(text)), "{}", one.name);
        }
        assert!(
            !report.contains(&*root().to_string_lossy()),
            "a path of this machine"
        );
    }

    #[test]
    fn a_crate_without_a_text_that_could_stand_for_it_is_refused() {
        let crates = compiled_into(&["kvpool-cli"], "x86_64-unknown-linux-gnu").unwrap();
        let scratch = std::env::temp_dir().join(format!("xtask-licences-{}", std::process::id()));
        std::fs::create_dir_all(&scratch).unwrap();
        let mut bare = crates.into_iter().find(|one| one.name == "bytes").unwrap();
        bare.directory = scratch.clone();
        bare.licence_file = None;
        bare.repository = String::new();
        bare.licence = "MIT AND Apache-2.0".into();
        assert!(texts_of(&bare, &[]).is_err());
        bare.licence = "MIT OR Apache-2.0".into();
        assert!(
            texts_of(&bare, &[]).unwrap()[0]
                .1
                .contains("Apache License")
        );
        std::fs::remove_dir_all(&scratch).unwrap();
    }
}
