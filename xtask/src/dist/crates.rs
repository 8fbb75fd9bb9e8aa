//! The crates whose code is in a release: cargo compiles them into the programs and the wheel.
//!
//! `cargo tree` resolves the features of these packages alone. `cargo metadata` knows licences and directories, but
//! lists all crates of the workspace, with the crates of its tests.

use crate::cargo::{cargo, list, root, text};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The packages of a release.
pub(super) const PROGRAMS: [&str; 4] = [
    "kvpool-master",
    "kvpool-store-node",
    "kvpool-cli",
    "kvpool-python",
];

/// A name and a version, which are unique where every crate has the same source.
type Id = (String, String);

pub(super) struct Crate {
    pub(super) name: String,
    pub(super) version: String,
    /// An SPDX expression; empty if the crate names none.
    pub(super) licence: String,
    pub(super) authors: Vec<String>,
    pub(super) repository: String,
    pub(super) description: String,
    /// The directory of its source.
    pub(super) directory: PathBuf,
    /// The file that it names as its licence.
    pub(super) licence_file: Option<PathBuf>,
    /// SHA-256 of its package; none of a crate of this workspace.
    pub(super) checksum: Option<String>,
    /// The indices of the crates that it uses.
    pub(super) uses: Vec<usize>,
}

impl Crate {
    pub(super) const fn is_ours(&self) -> bool {
        self.checksum.is_none()
    }
}

/// The crates in the order of their names.
pub(super) fn compiled_into(packages: &[&str], target: &str) -> Result<Vec<Crate>> {
    let compiled = tree(packages, target)?;
    let arguments = [
        "metadata",
        "--locked",
        "--format-version",
        "1",
        "--filter-platform",
        target,
    ];
    let metadata: Value = serde_json::from_str(&output(&arguments)?)?;
    let lock =
        std::fs::read_to_string(root().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    select(&compiled, &metadata, &checksums(&lock))
}

fn tree(packages: &[&str], target: &str) -> Result<BTreeSet<Id>> {
    // A procedural macro runs in the compiler: none of its code is in a program.
    let mut arguments = vec![
        "tree",
        "--locked",
        "--edges",
        "normal,no-proc-macro",
        "--prefix",
        "none",
    ];
    arguments.extend(["--format", "{p}", "--target", target]);
    let features: Vec<_> = packages
        .iter()
        .map(|package| format!("{package}/otlp"))
        .collect();
    let features = features.join(",");
    arguments.extend(["--features", &features]);
    for package in packages {
        arguments.extend(["--package", package]);
    }
    parse_tree(&output(&arguments)?)
}

/// Reads lines such as `name v1.2.3 (/place) (*)`, where all but two words are optional.
fn parse_tree(tree: &str) -> Result<BTreeSet<Id>> {
    let lines = tree.lines().filter(|line| !line.trim().is_empty());
    let ids = lines.map(|line| {
        let mut words = line.split_whitespace();
        let version = |word: &str| word.strip_prefix('v').map(str::to_owned);
        match (words.next(), words.next().and_then(version)) {
            (Some(name), Some(version)) => Ok((name.to_owned(), version)),
            _ => bail!("cargo tree wrote the line `{line}`, which is no crate"),
        }
    });
    ids.collect()
}

/// The checksums in Cargo.lock.
fn checksums(lock: &str) -> BTreeMap<Id, String> {
    let mut sums = BTreeMap::new();
    for package in lock.split("[[package]]") {
        let value = |key: &str| {
            let lines = package.lines();
            let mut values = lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            values
                .next()
                .map(|value| value.trim_matches('"').to_owned())
        };
        if let (Some(name), Some(version), Some(sum)) =
            (value("name"), value("version"), value("checksum"))
        {
            sums.insert((name, version), sum);
        }
    }
    sums
}

fn select(
    compiled: &BTreeSet<Id>,
    metadata: &Value,
    sums: &BTreeMap<Id, String>,
) -> Result<Vec<Crate>> {
    let mut crates = BTreeMap::new();
    for package in list(metadata, "packages")? {
        let id = (
            text(package, "name")?.to_owned(),
            text(package, "version")?.to_owned(),
        );
        if compiled.contains(&id) {
            crates.insert(
                id.clone(),
                (text(package, "id")?, describe(package, sums.get(&id))?),
            );
        }
    }
    if let Some((name, version)) = compiled.iter().find(|id| !crates.contains_key(*id)) {
        bail!("cargo metadata does not know {name} {version}, which cargo tree lists");
    }
    let ids = crates.values().map(|(id, _)| *id);
    let places: BTreeMap<&str, usize> = ids.zip(0..).collect();
    let mut uses: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for node in list(&metadata["resolve"], "nodes")? {
        let used = list(node, "deps")?.iter().filter(|dependency| {
            let kinds = dependency["dep_kinds"].as_array();
            kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
        });
        let used = used.filter_map(|dependency| places.get(dependency["pkg"].as_str()?).copied());
        let used: BTreeSet<usize> = used.collect();
        uses.insert(text(node, "id")?, used.into_iter().collect());
    }
    let crates = crates.into_values().map(|(id, found)| Crate {
        uses: uses.remove(id).unwrap_or_default(),
        ..found
    });
    Ok(crates.collect())
}

fn describe(package: &Value, checksum: Option<&String>) -> Result<Crate> {
    let optional = |name: &str| package[name].as_str().unwrap_or_default().to_owned();
    let manifest = Path::new(text(package, "manifest_path")?);
    let directory = manifest.parent().context("a manifest has no directory")?;
    let authors = list(package, "authors")?.iter();
    Ok(Crate {
        name: optional("name"),
        version: optional("version"),
        // Old manifests write a slash where SPDX has OR.
        licence: optional("license").replace(" / ", "/").replace('/', " OR "),
        authors: authors
            .filter_map(|author| author.as_str().map(str::to_owned))
            .collect(),
        repository: optional("repository"),
        description: optional("description")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" "),
        directory: directory.to_owned(),
        licence_file: package["license_file"]
            .as_str()
            .map(|file| directory.join(file)),
        checksum: checksum.cloned(),
        uses: Vec::new(),
    })
}

fn output(arguments: &[&str]) -> Result<String> {
    let output = cargo(arguments).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot run cargo {}", arguments[0]))?;
    if !output.status.success() {
        bail!("cargo {} failed", arguments[0]);
    }
    String::from_utf8(output.stdout).context("cargo's output is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_tree_is_a_name_and_a_version() {
        let tree = "kvpool-types v0.1.0 (/kvpool/types)\nbytes v1.2.3 (*)\n\nbytes v1.2.3\n";
        let ids = parse_tree(tree).unwrap();
        let ids: Vec<_> = ids
            .iter()
            .map(|(name, version)| format!("{name} {version}"))
            .collect();
        assert_eq!(ids, ["bytes 1.2.3", "kvpool-types 0.1.0"]);
        assert!(parse_tree("error: no").is_err());
    }

    #[test]
    fn a_lock_file_gives_the_sums_of_packages_from_elsewhere() {
        let lock = "[[package]]\nname = \"a\"\nversion = \"1\"\nchecksum = \"00ff\"\n\n\
                    [[package]]\nname = \"ours\"\nversion = \"2\"\n";
        let sums = checksums(lock);
        assert_eq!(sums.len(), 1);
        assert_eq!(sums[&("a".to_owned(), "1".to_owned())], "00ff");
    }

    #[test]
    fn the_programs_contain_our_crates_and_no_tool_of_the_tests() {
        let crates = compiled_into(&PROGRAMS, "x86_64-unknown-linux-gnu").unwrap();
        let find = |name: &str| crates.iter().find(|found| found.name == name);
        let types = find("kvpool-types").unwrap();
        assert!(types.is_ours());
        let master = find("kvpool-master").unwrap();
        assert!(
            master
                .uses
                .iter()
                .any(|used| crates[*used].name == "kvpool-types")
        );
        let bytes = find("bytes").unwrap();
        assert!(bytes.checksum.as_ref().is_some_and(|sum| sum.len() == 64));
        assert!(bytes.directory.join("Cargo.toml").is_file());
        for absent in ["proptest", "rcgen", "serde_derive", "rdma-sys"] {
            assert!(find(absent).is_none(), "{absent}");
        }
    }
}
