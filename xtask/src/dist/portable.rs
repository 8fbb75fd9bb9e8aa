//! The three programs, linked by zig for every Linux with glibc 2.17 or later.
//!
//! A link against this machine's glibc would require symbols that older systems lack. The linker of zig has the
//! symbol tables of every glibc. Both cargo-zigbuild and zig come as Python packages, in the environment that also
//! builds the wheels.

use crate::cargo::{DAEMONS, OTLP, cargo, root, rustc_libraries, succeeds, target_dir};
use crate::packages::Packages;
use crate::python::{self, COMMANDS};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The glibc of manylinux2014.
pub(super) const GLIBC: (u32, u32) = (2, 17);
/// The supported targets, each with its name in file names.
const TARGETS: [(&str, &str); 2] = [
    ("x86_64-unknown-linux-gnu", "x86_64"),
    ("aarch64-unknown-linux-gnu", "aarch64"),
];
/// The Python packages for linking, beside the packages that build the wheels.
const LINKERS: [&str; 2] = ["cargo-zigbuild", "ziglang"];

/// How to build for old systems: the target and the tools.
pub(crate) struct Portable {
    pub(crate) target: String,
    pub(crate) architecture: String,
    pub(crate) venv: PathBuf,
    profile: String,
}

impl Portable {
    /// Checks the target and gets the tools. `None` when their installation failed.
    pub(super) fn prepare(target: &str, profile: &str, packages: Packages) -> Result<Option<Self>> {
        let known = TARGETS.iter().find(|(name, _)| *name == target);
        let Some((target, architecture)) = known else {
            let names = TARGETS.map(|(name, _)| name).join(" and ");
            bail!("no release is made for the target `{target}`: the targets are {names}");
        };
        if !rustc_libraries(target)?.is_dir() {
            bail!(
                "Rust's standard library for {target} is missing: run `rustup target add {target}`, \
                 or build on a machine of that architecture"
            );
        }
        let venv = python::environment(packages)?.with_context(python::missing)?;
        if !succeeds(python::pip(&venv).args(LINKERS))? {
            bail!(
                "pip cannot install {}, which link for old systems",
                LINKERS.join(" and ")
            );
        }
        Ok(Some(Self {
            target: (*target).to_owned(),
            architecture: (*architecture).to_owned(),
            venv,
            profile: profile.to_owned(),
        }))
    }

    /// Builds the programs, stripped. `None` when the build failed.
    pub(super) fn programs(&self) -> Result<Option<Vec<PathBuf>>> {
        let (major, minor) = GLIBC;
        let target = format!("{}.{major}.{minor}", self.target);
        let mut build = cargo(&["zigbuild", "--locked", "--profile", &self.profile]);
        build.args(DAEMONS).args(OTLP).args(["--target", &target]);
        self.set_environment(&mut build)?;
        if !succeeds(&mut build)? {
            return Ok(None);
        }
        let built = target_dir()?.join(&self.target).join(&self.profile);
        Ok(Some(COMMANDS.map(|name| built.join(name)).to_vec()))
    }

    /// Sets the environment in which a build finds zig and gives the same bytes in every directory.
    pub(crate) fn set_environment(&self, command: &mut Command) -> Result<()> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::iter::once(self.venv.join("bin")).chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(paths)?);
        command.env("CARGO_ENCODED_RUSTFLAGS", flags()?);
        // rustc strips for every architecture; the machine's `strip` knows its own only.
        let profile = self.profile.to_uppercase().replace('-', "_");
        command.env(format!("CARGO_PROFILE_{profile}_STRIP"), "symbols");
        Ok(())
    }

    /// Whether programs of the target run here, and this machine's packages are of its architecture.
    pub(super) fn is_of_this_machine(&self) -> bool {
        self.architecture == std::env::consts::ARCH
    }

    /// The target as container images name it.
    pub(super) fn platform(&self) -> &'static str {
        match self.architecture.as_str() {
            "aarch64" => "linux/arm64",
            _ => "linux/amd64",
        }
    }

    /// The arguments with which maturin builds the same way.
    pub(crate) fn maturin(&self) -> [&str; 7] {
        let Self {
            target, profile, ..
        } = self;
        [
            "--zig",
            "--compatibility",
            "manylinux2014",
            "--target",
            target,
            "--profile",
            profile,
        ]
    }
}

/// The caller's flags, and names for the directories that would stand in panic messages.
fn flags() -> Result<OsString> {
    let mut flags = match std::env::var_os("CARGO_ENCODED_RUSTFLAGS") {
        Some(flags) => flags,
        None => std::env::var("RUSTFLAGS")
            .unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join("\u{1f}")
            .into(),
    };
    let mut rename = |from: &Path, to: &str| {
        if !flags.is_empty() {
            flags.push("\u{1f}");
        }
        flags.push("--remap-path-prefix=");
        flags.push(from);
        flags.push("=");
        flags.push(to);
    };
    rename(&cargo_home()?, "/cargo");
    rename(root(), "/kvpool");
    Ok(flags)
}

fn cargo_home() -> Result<PathBuf> {
    let given = std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty());
    match given {
        Some(home) => Ok(std::path::absolute(home)?),
        None => {
            let home = std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?;
            Ok(PathBuf::from(home).join(".cargo"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_without_a_release_is_refused_by_name() {
        let refused = Portable::prepare("riscv64gc-unknown-linux-gnu", "dist", Packages::LeaveOut);
        let text = format!("{:#}", refused.err().unwrap());
        assert!(
            text.contains("riscv64gc") && text.contains("aarch64"),
            "{text}"
        );
    }

    #[test]
    fn a_target_without_its_standard_library_is_refused_with_the_remedy() {
        let target = "aarch64-unknown-linux-gnu";
        if rustc_libraries(target).unwrap().is_dir() {
            eprintln!("SKIPPED a_target_without_its_standard_library: {target} is installed");
            return;
        }
        let refused = Portable::prepare(target, "dist", Packages::LeaveOut);
        let text = format!("{:#}", refused.err().unwrap());
        assert!(
            text.contains(&format!("rustup target add {target}")),
            "{text}"
        );
    }

    #[test]
    fn the_flags_rename_the_directories_of_this_machine() {
        let flags = flags().unwrap();
        let flags = flags.to_string_lossy();
        let renamed = format!("--remap-path-prefix={}=/kvpool", root().display());
        assert!(flags.split('\u{1f}').any(|flag| flag == renamed), "{flags}");
    }
}
