//! `cargo xtask wheels`, and the Python tests of `cargo xtask test`.
//!
//! All Python packages lie in a virtual environment, `target/python/venv`: the tools that build the wheels, the built
//! wheels, and the packages of the tests.

use crate::cargo::{
    DAEMONS, EVERYTHING, OTLP, answers, cargo, forget_xtask, root, succeeds, target_dir, watch_both,
};
use crate::dist::portable::Portable;
use crate::packages::Packages;
use crate::tally::{Pytest, Tally};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest Python that the wheels are for.
pub(crate) const OLDEST: &str = "import sys; sys.exit(sys.version_info < (3, 11))";
/// The packages that build the wheels.
const BUILDERS: [&str; 2] = ["maturin>=1.9,<2", "hatchling"];
/// The packages of the tests.
const TESTERS: [&str; 7] = [
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "mypy",
    "numpy",
    "aiohttp",
    "msgpack",
];
/// The programs that the wheel contains.
pub(crate) const COMMANDS: [&str; 3] = ["kvmaster", "kvstore-node", "kvctl"];
/// The tests of the wheel `kvpool`, its connectors among them.
const OWN_TESTS: &str = "python/tests";
/// The tests of the wheel `kvpool-mooncake`.
const MOONCAKE_TESTS: &str = "python/kvpool-mooncake/tests";
/// The tests mostly wait. The tests of one file share a pool, so one process runs all of them.
const PROCESSES: [&str; 4] = ["-n", "2", "--dist", "loadfile"];
/// Debian's package of the module venv.
const VENV: &str = "python3-venv";

/// How the wheels' binaries are built.
#[derive(Clone, Copy)]
enum Profile {
    /// For use: the fastest profile.
    Dist,
    /// For tests: the profile of the other tests' binaries.
    Debug,
}
/// With this feature the wheel needs no other crates than the tests. A build of one package alone
/// would compile dependencies with fewer features.
const SHARED_BUILD: &str = "shared-build";
/// The directory in which maturin looks for the programs.
const COMMANDS_DIR: &str = "python/kvpool.data/scripts";

/// Builds the wheels `kvpool` and `kvpool-mooncake` and prints their paths.
pub(crate) fn wheels(packages: Packages) -> Result<bool> {
    let venv = environment(packages)?.with_context(missing)?;
    let Some(wheels) = build(&venv, Profile::Dist)? else {
        return Ok(false);
    };
    println!();
    for wheel in wheels {
        println!("{}", wheel.display());
    }
    Ok(true)
}

/// The message for a missing Python, without which there is no environment.
pub(crate) fn missing() -> String {
    format!(
        "Python 3.11 or later with the module venv is missing (Debian: {VENV}; --install adds it)"
    )
}

/// Builds the wheels for every Linux with glibc 2.17 or later, with `programs` inside. `None` when a build
/// failed.
pub(crate) fn portable_wheels(
    portable: &Portable,
    programs: &[PathBuf],
) -> Result<Option<Vec<PathBuf>>> {
    let out = empty_folder()?;
    let commands = root().join(COMMANDS_DIR);
    std::fs::create_dir_all(&commands)?;
    for (command, program) in COMMANDS.iter().zip(programs) {
        std::fs::copy(program, commands.join(command))
            .with_context(|| format!("cannot copy {}", program.display()))?;
    }
    let mut native = tool(&portable.venv, "maturin");
    native.args(["build", "--locked", "--manifest-path", "python/Cargo.toml"]);
    native.args(portable.maturin()).arg("--out").arg(&out);
    native.args(["--features", "otlp"]);
    portable.set_environment(&mut native)?;
    if !succeeds(&mut native)? || !succeeds(&mut mooncake(&portable.venv, &out))? {
        return Ok(None);
    }
    Ok(Some(files(&out)?))
}

/// Builds the wheels as the daemons were built, installs them, and runs the tests of both.
pub(crate) fn test(packages: Packages, tally: &mut Tally) -> Result<()> {
    let Some(venv) = environment(packages)? else {
        let why = format!("Python 3.11 or later with venv is missing (Debian: {VENV})");
        tally.skip("the Python tests", &why);
        return Ok(());
    };
    let wheels = build(&venv, Profile::Debug)?.unwrap_or_default();
    let mut reinstall = pip(&venv);
    reinstall.args(["--force-reinstall", "--no-deps"]);
    let installed = !wheels.is_empty() && succeeds(reinstall.args(&wheels))?;
    tally.check("the wheels", installed);
    if !installed {
        return Ok(());
    }
    // The two test runs go in parallel, because both wait more than they compute.
    let mut own = Pytest::default();
    let mut mooncakes = Pytest::default();
    let [own_ended_well, mooncakes_ended_well] = watch_both(
        (&mut pytest(&venv, OWN_TESTS)?, &mut |line| own.read(line)),
        (&mut pytest(&venv, MOONCAKE_TESTS)?, &mut |line| {
            mooncakes.read(line);
        }),
    )?;
    tally.add("the Python tests", own.tally(), own_ended_well);
    let of_mooncake = "the tests of kvpool-mooncake";
    tally.add(of_mooncake, mooncakes.tally(), mooncakes_ended_well);
    let mut mypy = tool(&venv, "mypy");
    mypy.args(["--strict", "-p", "kvpool", "-p", "mooncake"]);
    mypy.arg("--cache-dir")
        .arg(target_dir()?.join("python/mypy"));
    tally.check("mypy", succeeds(&mut mypy)?);
    Ok(())
}

/// The command that runs the tests of a folder with the programs of the installed wheel.
fn pytest(venv: &Path, tests: &str) -> Result<Command> {
    let mut command = tool(venv, "pytest");
    command.args(["-v", "-rs"]).args(PROCESSES).arg(tests);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(venv.join("bin")).chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(paths)?);
    Ok(command)
}

/// Returns the virtual environment, with the packages for builds and tests. Makes it if it is missing. `None` where
/// there is no Python for it.
pub(crate) fn environment(packages: Packages) -> Result<Option<PathBuf>> {
    let venv = target_dir()?.join("python/venv");
    // Python gets a script to run: without one it would wait for typed input.
    if !answers(tool(&venv, "python").args(["-c", OLDEST])) {
        let has = |module: &str| {
            let code = format!("{OLDEST}\nimport {module}");
            answers(Command::new("python3").args(["-c", &code]))
        };
        // Debian has the module `venv` in a separate package.
        let can_make = has("ensurepip") || (packages.install(&[VENV])? && has("ensurepip"));
        if !can_make {
            return Ok(None);
        }
        let mut make = Command::new("python3");
        make.args(["-m", "venv", "--clear"]).arg(&venv);
        if !succeeds(&mut make)? {
            return Ok(None);
        }
    }
    if !succeeds(pip(&venv).args(BUILDERS).args(TESTERS))? {
        bail!("cannot install the tools that build and test the wheels");
    }
    Ok(Some(venv))
}

/// Builds the wheels. Returns `None` when a build failed.
fn build(venv: &Path, profile: Profile) -> Result<Option<Vec<PathBuf>>> {
    let target = target_dir()?;
    let out = empty_folder()?;
    let (folder, profile, daemons, features) = match profile {
        // The delivered wheels export traces (ADR 0034).
        Profile::Dist => (
            "dist",
            ["--profile", "dist"],
            [&DAEMONS[..], &OTLP[..]].concat(),
            "otlp",
        ),
        Profile::Debug => (
            "debug",
            ["--profile", "dev"],
            EVERYTHING.to_vec(),
            SHARED_BUILD,
        ),
    };
    if !succeeds(cargo(&["build"]).args(profile).args(daemons))? {
        return Ok(None);
    }
    let commands = root().join(COMMANDS_DIR);
    std::fs::create_dir_all(&commands)?;
    for command in COMMANDS {
        let from = target.join(folder).join(command);
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(commands.join(command)).arg(from);
        if !succeeds(&mut strip)? {
            return Ok(None);
        }
    }
    let mut native = tool(venv, "maturin");
    native.args(["build", "--manifest-path", "python/Cargo.toml"]);
    native.args(profile).arg("--out").arg(&out);
    native.args(["--features", features]);
    if !succeeds(&mut native)? || !succeeds(&mut mooncake(venv, &out))? {
        return Ok(None);
    }
    Ok(Some(files(&out)?))
}

/// The directory of the wheels, without wheels of an earlier build.
fn empty_folder() -> Result<PathBuf> {
    let out = target_dir()?.join("wheels");
    if out.exists() {
        std::fs::remove_dir_all(&out).context("cannot remove the wheels of an earlier build")?;
    }
    Ok(out)
}

/// The command that builds the wheel `kvpool-mooncake`, which is pure Python.
fn mooncake(venv: &Path, out: &Path) -> Command {
    let mut pip = tool(venv, "python");
    pip.args(["-m", "pip", "wheel", "--quiet", "--no-deps"]);
    pip.args(["--no-build-isolation", "--wheel-dir"]);
    pip.arg(out).arg("./python/kvpool-mooncake");
    pip
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    Ok(entries.collect::<Result<_, _>>()?)
}

pub(crate) fn pip(venv: &Path) -> Command {
    let mut pip = tool(venv, "python");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip
}

/// A program of the environment, run in the repository's root.
fn tool(venv: &Path, name: &str) -> Command {
    let mut command = Command::new(venv.join("bin").join(name));
    command.current_dir(root());
    // maturin runs cargo, which would rebuild many crates for the changed environment.
    forget_xtask(&mut command);
    if name == "python" {
        command.arg("-I");
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const WHEEL: &str = "kvpool-python";

    /// The packages of `cargo tree`, each with its version and features, without the package of the wheel.
    fn libraries(args: &[&str]) -> BTreeSet<String> {
        let mut tree = cargo(&[
            "tree", "--locked", "--prefix", "none", "--format", "{p} {f}",
        ]);
        let output = tree.args(args).output().unwrap();
        let problem = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{problem}");
        let tree = String::from_utf8(output.stdout).unwrap();
        let packages = tree.lines().map(|line| line.trim_end_matches(" (*)"));
        let is_library = |package: &&str| !package.is_empty() && !package.starts_with(WHEEL);
        packages.filter(is_library).map(str::to_owned).collect()
    }

    /// A library with other features is built again, and so is all that depends on it.
    #[test]
    fn the_wheel_for_tests_needs_no_library_with_other_features_than_the_workspace() {
        let all = libraries(&["--workspace", "--edges", "normal,build,dev"]);
        let wheel = ["--package", WHEEL, "--edges", "normal"];
        let of_wheel = libraries(&[&wheel[..], &["--features", SHARED_BUILD]].concat());
        assert!(of_wheel.len() > 100, "{of_wheel:?}");
        let others: Vec<_> = of_wheel.difference(&all).collect();
        assert!(
            others.is_empty(),
            "python/Cargo.toml: `{SHARED_BUILD}` lacks features of {others:?}"
        );
    }
}
