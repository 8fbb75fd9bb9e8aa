//! Proof that the tests of the invariants can fail: each mechanism is switched off in a copy of the
//! tree, and the test that names it must notice.

mod bytes;
mod handoff;
mod master;
mod media;
mod replicas;
mod security;
mod tenants;

use crate::cargo::{DAEMONS, cargo, root, target_dir};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One mechanism: the text that is it, and what stands there when it is off.
struct Mechanism {
    invariant: u8,
    what: &'static str,
    file: &'static str,
    on: &'static str,
    off: &'static str,
    /// The package and name of the test that must fail.
    package: &'static str,
    test: &'static str,
}

/// Every mechanism, by what it keeps.
const MECHANISMS: [&[Mechanism]; 7] = [
    master::MECHANISMS,
    bytes::MECHANISMS,
    media::MECHANISMS,
    replicas::MECHANISMS,
    tenants::MECHANISMS,
    security::MECHANISMS,
    handoff::MECHANISMS,
];

/// The mechanisms to switch off.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only those of the invariant with this number [default: all]
    invariant: Option<u8>,
    /// Only those whose file or test has this text in its name
    #[arg(long, value_name = "TEXT")]
    of: Option<String>,
}

/// Switches mechanisms off one by one; true when every test noticed.
pub(crate) fn run(args: &Args) -> Result<bool> {
    let place = target_dir()?.join("switch-off");
    let tree = place.join("tree");
    copy_tree(&tree)?;
    let mut unnoticed = 0;
    let chosen = MECHANISMS
        .into_iter()
        .flatten()
        .filter(|m| args.invariant.is_none_or(|only| only == m.invariant))
        .filter(|m| {
            let is_named = |text: &String| m.file.contains(text) || m.test.contains(text);
            args.of.as_ref().is_none_or(is_named)
        });
    for mechanism in chosen {
        let Mechanism {
            invariant,
            what,
            test,
            ..
        } = mechanism;
        let verdict = match try_one(mechanism, &tree, &place.join("build"))? {
            Verdict::Noticed => "noticed",
            Verdict::Unnoticed => {
                unnoticed += 1;
                "NOT NOTICED"
            }
            Verdict::Broken => {
                unnoticed += 1;
                "DOES NOT BUILD"
            }
        };
        println!("invariant {invariant}, without \"{what}\": {verdict} by {test}");
    }
    Ok(unnoticed == 0)
}

enum Verdict {
    Noticed,
    Unnoticed,
    Broken,
}

fn try_one(mechanism: &Mechanism, tree: &Path, build: &Path) -> Result<Verdict> {
    let file = tree.join(mechanism.file);
    let text = std::fs::read_to_string(&file)?;
    if !text.contains(mechanism.on) {
        bail!("{} no longer contains `{}`", mechanism.file, mechanism.on);
    }
    std::fs::write(&file, text.replace(mechanism.on, mechanism.off))?;
    let built = ["--quiet", "build"]
        .iter()
        .chain(&DAEMONS)
        .copied()
        .collect::<Vec<_>>();
    let builds = quietly(in_copy(&built, tree, build))?
        && quietly(in_copy(
            &["--quiet", "test", "--no-run", "-p", mechanism.package],
            tree,
            build,
        ))?;
    let outcome = if builds {
        let test = [
            "--quiet",
            "test",
            "-p",
            mechanism.package,
            "--tests",
            "--",
            mechanism.test,
        ];
        if quietly(in_copy(&test, tree, build))? {
            Verdict::Unnoticed
        } else {
            Verdict::Noticed
        }
    } else {
        Verdict::Broken
    };
    std::fs::write(&file, text)?;
    Ok(outcome)
}

fn in_copy(args: &[&str], tree: &Path, build: &Path) -> Command {
    let mut command = cargo(args);
    command.current_dir(tree).env("CARGO_TARGET_DIR", build);
    command
}

fn quietly(mut command: Command) -> Result<bool> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    Ok(output.status.success())
}

/// Copies every file that git knows, as it is in the working tree.
fn copy_tree(tree: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()?;
    let files = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
    for file in files.split('\0').filter(|file| !file.is_empty()) {
        let from = root().join(file);
        let to: PathBuf = tree.join(file);
        if !from.is_file() {
            continue;
        }
        let bytes = std::fs::read(&from)?;
        // What is the same keeps its time, so that it is not built again.
        if std::fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(directory) = to.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(&to, bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mechanism_stands_in_its_file_and_its_test_exists() {
        let listed = Command::new("git")
            .args(["grep", "--no-color", "-hE", "fn [a-z0-9_]+", "--", "*.rs"])
            .current_dir(root())
            .output()
            .unwrap();
        let functions = String::from_utf8(listed.stdout).unwrap();
        for mechanism in MECHANISMS.into_iter().flatten() {
            let Mechanism {
                file,
                on,
                off,
                test,
                ..
            } = mechanism;
            let text = std::fs::read_to_string(root().join(file)).unwrap();
            assert!(text.contains(on), "{file} no longer contains `{on}`");
            assert_ne!(on, off, "{file}");
            let name = test.rsplit("::").next().unwrap();
            let is_there = functions.contains(&format!("fn {name}"));
            assert!(is_there, "no test is called {name}");
        }
    }
}
