//! The table of crates in docs/ARCHITECTURE.md against `cargo metadata`.

use crate::cargo::{Package, metadata, root};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const DOCUMENT: &str = "docs/ARCHITECTURE.md";

/// The directory of each crate, and the directories of the crates that it depends on.
type Crates = BTreeMap<String, BTreeSet<String>>;

/// The differences between the table and the workspace, one sentence each.
pub(super) fn differences() -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root().join(DOCUMENT));
    let text = text.with_context(|| format!("cannot read {DOCUMENT}"))?;
    let told =
        table(&text).context("docs/ARCHITECTURE.md has no table `crate | … | depends on`")?;
    // The table may also name directories that are not crates, such as a Python package.
    let is_package = |directory: &str| {
        let directory = root().join(directory);
        directory.is_dir() && !directory.join("Cargo.toml").is_file()
    };
    Ok(compare(
        &told,
        &workspace(&metadata()?.packages),
        is_package,
    ))
}

fn workspace(packages: &[Package]) -> Crates {
    let below_root = |path: &Path| {
        let path = path.strip_prefix(root()).unwrap_or(path);
        path.to_string_lossy().into_owned()
    };
    let crates = packages.iter().map(|package| {
        let directory = package.manifest_path.parent().unwrap_or(root());
        let dependencies = package.dependencies.iter();
        // The table lists normal dependencies: the tests of a crate may use more.
        let built_from = dependencies.filter(|dependency| dependency.kind.is_none());
        let paths = built_from.filter_map(|dependency| dependency.path.as_deref());
        (below_root(directory), paths.map(below_root).collect())
    });
    crates.collect()
}

/// Reads the first table whose first column is `crate` and which has a column `depends on`.
fn table(document: &str) -> Option<Crates> {
    let mut lines = document.lines();
    let depends = lines.find_map(|line| {
        let header = cells(line)?;
        let is_first = header.first().is_some_and(|name| name == "crate");
        let depends = header.iter().position(|name| name == "depends on");
        depends.filter(|_| is_first)
    })?;
    // The line under the header.
    lines.next();
    let rows = lines.map_while(cells).filter_map(|row| {
        let directory = row.first()?.trim_matches('`').trim_end_matches('/');
        Some((directory.to_owned(), names(row.get(depends)?)))
    });
    Some(rows.collect())
}

fn cells(line: &str) -> Option<Vec<String>> {
    let row = line.trim().strip_prefix('|')?.trim_end_matches('|');
    Some(row.split('|').map(|cell| cell.trim().to_owned()).collect())
}

/// The names in a cell such as `types, etcd (for its tests)`; none in `-`.
fn names(cell: &str) -> BTreeSet<String> {
    let mut plain = String::new();
    let mut depth = 0_u32;
    for letter in cell.chars() {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '`' => {}
            letter if depth == 0 => plain.push(letter),
            _ => {}
        }
    }
    let names = plain
        .split(',')
        .map(|name| name.trim().trim_end_matches('/'));
    let names = names.filter(|name| !name.is_empty() && *name != "-");
    names.map(str::to_owned).collect()
}

fn compare(told: &Crates, built: &Crates, is_package: impl Fn(&str) -> bool) -> Vec<String> {
    let mut differences = Vec::new();
    for (name, dependencies) in built {
        let Some(told) = told.get(name) else {
            differences.push(format!("the table of crates lacks `{name}/`"));
            continue;
        };
        let list = |names: BTreeSet<&String>| names.into_iter().cloned().collect::<Vec<_>>();
        let missing = list(dependencies.difference(told).collect());
        let extra = list(told.difference(dependencies).collect());
        if !missing.is_empty() {
            let missing = missing.join(", ");
            differences.push(format!(
                "`{name}/` depends on {missing}: the table does not say so"
            ));
        }
        if !extra.is_empty() {
            let extra = extra.join(", ");
            differences.push(format!(
                "`{name}/` does not depend on {extra}: the table says so"
            ));
        }
    }
    let unknown = told.keys().filter(|name| !built.contains_key(*name));
    for name in unknown.filter(|name| !is_package(name)) {
        differences.push(format!("there is no crate `{name}/`"));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "\
# Title

| other | table |
|---|---|
| x | y |

| crate | what it is | depends on |
|---|---|---|
| `types/` | keys | - |
| `master/` | the master | types, `etcd` (over TLS, too) |
| `python/wheel/` | a wheel | types |

| crate | depends on |
";

    fn crates(crates: &[(&str, &[&str])]) -> Crates {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let crates = crates
            .iter()
            .map(|(name, on)| ((*name).to_owned(), owned(on)));
        crates.collect()
    }

    fn differences(built: &[(&str, &[&str])]) -> Vec<String> {
        let told = table(DOCUMENT).unwrap();
        compare(&told, &crates(built), |name| name == "python/wheel")
    }

    #[test]
    fn a_table_that_says_what_is_built_has_no_differences() {
        let built: [(&str, &[&str]); 2] = [("types", &[]), ("master", &["types", "etcd"])];
        assert_eq!(differences(&built), [""; 0]);
    }

    #[test]
    fn each_difference_is_told_once() {
        let built: [(&str, &[&str]); 2] = [("daemon", &[]), ("master", &["types", "proto"])];
        assert_eq!(
            differences(&built),
            [
                "the table of crates lacks `daemon/`",
                "`master/` depends on proto: the table does not say so",
                "`master/` does not depend on etcd: the table says so",
                "there is no crate `types/`",
            ]
        );
    }

    #[test]
    fn a_document_without_the_table_is_none() {
        assert!(table("| crate | what it is |\n|---|---|\n").is_none());
    }
}
