//! The archive of the Helm chart.

use super::release::Release;
use crate::cargo::{root, succeeds};
use crate::charts;
use crate::packages::Packages;
use anyhow::Result;
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
    let mut package = Command::new(&helm);
    package
        .arg("package")
        .arg(&chart)
        .arg("--destination")
        .arg(&made);
    package.args(["--app-version", &release.version]);
    if !succeeds(&mut package)? {
        release.leave_out("the chart", "helm package failed; its message is above");
        return Ok(());
    }
    for archive in std::fs::read_dir(&made)? {
        release.keep(&archive?.path())?;
    }
    std::fs::remove_dir_all(&made)?;
    Ok(())
}
