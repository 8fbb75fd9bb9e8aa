//! The archive of the Helm chart.

use super::release::Release;
use crate::cargo::{must_succeed, root};
use crate::charts;
use crate::packages::Packages;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

const CHART: &str = "charts/kvpool";

/// Writes the chart's archive with helm, or notes that helm is missing. `KVPOOL_HELM` names another helm.
pub(super) fn write(release: &mut Release) -> Result<()> {
    let Some(helm) = charts::helm(Packages::LeaveOut)? else {
        release.leave_out("the chart", "helm is missing; KVPOOL_HELM can name one");
        return Ok(());
    };
    let made = release.folder.join("chart");
    release.keep(&package(&helm, &release.version, &made)?)?;
    if made.exists() {
        std::fs::remove_dir_all(&made)?;
    }
    Ok(())
}

/// Packs the chart for programs of this version into a folder.
fn package(helm: &Path, version: &str, folder: &Path) -> Result<PathBuf> {
    let mut package = Command::new(helm);
    package.arg("package").arg(root().join(CHART));
    package.arg("--destination").arg(folder);
    package.args(["--app-version", version]);
    must_succeed(&mut package).context("cannot pack the chart")?;
    let archive = std::fs::read_dir(folder)?.next();
    let archive = archive.context("helm package wrote no archive")?;
    Ok(archive?.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of helm and tar, as text.
    fn output(program: &Path, args: &[&str], archive: &Path) -> String {
        let output = Command::new(program).args(args).arg(archive).output();
        let output = output.expect("the program runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("the output is text")
    }

    #[test]
    fn a_helm_that_fails_is_an_error() {
        let folder = std::env::temp_dir().join("kvpool-chart-that-is-not-made");
        let error = package(Path::new("false"), "7.8.9", &folder).unwrap_err();
        assert!(format!("{error:#}").contains("cannot pack the chart"));
    }

    #[test]
    fn the_archive_has_the_chart_and_the_version_of_the_programs() -> Result<()> {
        let Some(helm) = charts::helm(Packages::LeaveOut)? else {
            eprintln!(
                "SKIPPED the_archive_has_the_chart: helm is missing; KVPOOL_HELM can name one"
            );
            return Ok(());
        };
        let folder = std::env::temp_dir().join(format!("kvpool-chart-{}", std::process::id()));
        let archive = package(&helm, "7.8.9", &folder)?;
        let about = output(&helm, &["show", "chart"], &archive);
        assert!(
            about.lines().any(|line| line == "appVersion: 7.8.9"),
            "{about}"
        );
        let files = output(Path::new("tar"), &["-tzf"], &archive);
        for file in [
            "values.schema.json",
            "templates/node.yaml",
            "rules/kvpool.yaml",
        ] {
            assert!(
                files.lines().any(|line| line == format!("kvpool/{file}")),
                "{files}"
            );
        }
        let manifests = output(&helm, &["template", "kvpool"], &archive);
        assert!(manifests.contains("localhost/kvpool:7.8.9"), "{manifests}");
        std::fs::remove_dir_all(&folder)?;
        Ok(())
    }
}
