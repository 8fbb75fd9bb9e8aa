//! Reports to the master on replicas that could not be read.

use crate::clock::Deadline;
use crate::control::{Call, Control};
use kvpool_proto::{ReportReplicasRequest, ReportedReplica};
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, Key, Length, SegmentId, Version};
use std::sync::Arc;

/// One replica whose read failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) key: Key,
    pub(crate) version: Version,
    pub(crate) segment: SegmentId,
    pub(crate) code: Code,
}

/// Sends reports to the master. A lost report does no harm, since the next reader reports the replica again.
pub(crate) async fn send(control: &Control, reports: Vec<Report>, call: Call) {
    if reports.is_empty() {
        return;
    }
    let request = ReportReplicasRequest {
        caller: None,
        keys: pack(reports.iter().map(|report| &report.key)).into(),
        reports: reports
            .iter()
            .map(|report| ReportedReplica {
                version: report.version.0,
                segment: report.segment.0,
                code: report.code.to_wire().into(),
            })
            .collect(),
    };
    if let Err(error) = control.call(request, call).await {
        tracing::debug!(%error, count = reports.len(), "failed replicas not reported to the master");
    }
}

/// Reports failed replicas to the master before a block is looked up again. A report of a checksum mismatch
/// is waited for: the master hides that replica at once, and the lookup must see this. A report of an
/// unreachable replica is not waited for, since this replica stays until its node is suspect.
pub(crate) async fn send_before_lookup(
    control: &Arc<Control>,
    reports: Vec<Report>,
    deadline: Deadline,
) {
    let (unreachable, wrong) = reports
        .into_iter()
        .partition(|report| report.code == Code::Unreachable);
    send_soon(control, unreachable, deadline);
    send(control, wrong, Call::by(deadline.share(2, Length(0)))).await;
}

/// Reports failed replicas in the background.
pub(crate) fn send_soon(control: &Arc<Control>, reports: Vec<Report>, deadline: Deadline) {
    if !reports.is_empty() {
        let (telling, call) = (Arc::clone(control), Call::by(deadline).aside());
        control.spawn(async move { send(&telling, reports, call).await });
    }
}
