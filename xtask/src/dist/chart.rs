//! The archive of the Helm chart.

use super::release::Release;
use crate::cargo::{root, succeeds};
use crate::charts;
use crate::packages::Packages;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

const CHART: &str = "charts/kvpool";

/// Writes the chart's archive with helm, or notes why there is none. `KVPOOL_HELM` names another helm.
pub(super) fn write(release: &mut Release) -> Result<()> {
    let chart = root().join(CHART);
    if !chart.join("Chart.yaml").is_file() {
        release.leave_out("the chart", &format!("there is no {CHART}"));
        return Ok(());
    }
    let Some(helm) = charts::helm(Packages::LeaveOut)? else {
        release.leave_out("the chart", "helm is missing; KVPOOL_HELM can name one");
        return Ok(());
    };
    let made = release.folder.join("chart");
    if let Some(archive) = package(&helm, &release.version, &made)? {
        release.keep(&archive)?;
    } else {
        release.leave_out("the chart", "helm package failed; its message is above");
    }
    if made.exists() {
        std::fs::remove_dir_all(&made)?;
    }
    Ok(())
}

/// Packs the chart for programs of this version into a folder. `None` where helm refuses.
fn package(helm: &Path, version: &str, folder: &Path) -> Result<Option<PathBuf>> {
    let mut package = Command::new(helm);
    package.arg("package").arg(root().join(CHART));
    package.arg("--destination").arg(folder);
    package.args(["--app-version", version]);
    if !succeeds(&mut package)? {
        return Ok(None);
    }
    let archive = std::fs::read_dir(folder)?.next();
    let archive = archive.context("helm package wrote no archive")?;
    Ok(Some(archive?.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What helm and tar print, as text.
    fn output(program: &Path, args: &[&str], archive: &Path) -> String {
        let output = Command::new(program).args(args).arg(archive).output();
        let output = output.expect("the program runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("the output is text")
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
        let archive = package(&helm, "7.8.9", &folder)?.context("helm package failed")?;
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
