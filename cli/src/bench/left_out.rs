//! Cases that are asked for and cannot be measured here, and why.

use super::agent::protocol::Way;
use super::cases::{Case, Goal, Path};
use super::veth::Veth;
use crate::connection::{Connection, Transport};
use crate::doctor::host::Host;
use crate::doctor::pool::nodes_by;
use crate::output;
use serde::Serialize;
use std::sync::Arc;

/// Some cases with one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LeftOut {
    /// Their names.
    pub(crate) cases: Vec<String>,
    /// Why they are left out.
    pub(crate) reason: String,
}

impl LeftOut {
    /// For people.
    pub(crate) fn text(&self) -> String {
        let Self { cases, reason } = self;
        match cases.as_slice() {
            [one] => format!("{one} was skipped: {reason}"),
            several => format!("{} cases were skipped: {reason}", several.len()),
        }
    }
}

/// Parts what can be measured from what cannot, where transfers cycle through `span` bytes and
/// `no_rdma` says why there is no RDMA, if there is none.
pub(crate) fn part(
    cases: Vec<Case>,
    span: u64,
    no_rdma: Option<&str>,
) -> (Vec<Case>, Vec<LeftOut>) {
    let mut left_out: Vec<LeftOut> = Vec::new();
    let mut leave = |cases: Vec<Case>, reason: String| {
        if !cases.is_empty() {
            let cases = cases.into_iter().map(|case| case.id).collect();
            left_out.push(LeftOut { cases, reason });
        }
    };
    let (rdma, cases): (Vec<Case>, Vec<Case>) = cases
        .into_iter()
        .partition(|case| no_rdma.is_some() && case.place.way == Way::Rdma);
    leave(rdma, format!("no RDMA: {}", no_rdma.unwrap_or_default()));
    let (cases, large): (Vec<Case>, Vec<Case>) =
        cases.into_iter().partition(|case| case.fits(span));
    let room = output::bytes(span);
    leave(
        large,
        format!("the batch is larger than the {room} that transfers cycle through (--span)"),
    );
    (cases, left_out)
}

/// The link that cases over TCP go over, and what that is in words. Where there is none they go over
/// loopback, and nothing is asked of them.
pub(crate) fn path(cases: &mut [Case], connection: &Connection) -> (Option<Arc<Veth>>, String) {
    if !cases.iter().any(|case| case.place.path == Path::Veth) {
        return (None, String::new());
    }
    let reason = if connection.master.is_some() {
        "the network to the named pool, their limits over loopback".to_owned()
    } else {
        match Veth::lay() {
            Ok(veth) => {
                let what = "a veth link between two network namespaces, their limits too";
                return (Some(Arc::new(veth)), what.to_owned());
            }
            Err(error) => {
                format!("loopback, because network namespaces cannot be created: {error:#}")
            }
        }
    };
    for case in cases {
        if case.place.path == Path::Veth {
            case.place.path = Path::Loopback;
            case.goal = Goal::None("it applies between network namespaces only");
        }
    }
    (None, reason)
}

/// Why some of the cases that go over RDMA cannot, if they cannot.
pub(crate) async fn no_rdma(
    cases: &[Case],
    connection: &Connection,
) -> anyhow::Result<Option<String>> {
    if !cases.iter().any(|case| case.place.way == Way::Rdma) {
        return Ok(None);
    }
    let (host, _) = tokio::task::spawn_blocking(Host::read).await?;
    if host.rdma.reason.is_some() || connection.master.is_none() {
        // Nodes that this run starts have what this host has.
        return Ok(host.rdma.reason);
    }
    // Blocks come to lie on any node of a pool that was there before.
    let nodes = nodes_by(connection, Transport::Rdma).await?;
    Ok(nodes.iter().find_map(|node| {
        let way = node
            .ways
            .iter()
            .find(|way| way.transport == Transport::Rdma)?;
        (!way.works).then(|| format!("node {}: {}", node.name, way.reason))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cases::table;

    const MIB: u64 = 1 << 20;

    fn ids(cases: &[Case]) -> Vec<&str> {
        cases.iter().map(|case| case.id.as_str()).collect()
    }

    #[test]
    fn what_goes_over_rdma_is_left_out_where_there_is_none_and_the_reason_is_told_once() {
        let rdma = |id: &str| id.starts_with("rdma/");
        let all = table();
        let many = all.iter().filter(|case| rdma(&case.id)).count();
        assert_eq!(many, 8);
        let (cases, left_out) = part(table(), 128 * MIB, Some("no device"));
        assert!(!cases.iter().any(|case| rdma(&case.id)));
        assert_eq!(cases.len() + many, all.len());
        let [left_out] = left_out.as_slice() else {
            panic!("{left_out:?}");
        };
        assert_eq!(left_out.cases.len(), many);
        assert_eq!(left_out.text(), "8 cases were skipped: no RDMA: no device");
        let (cases, left_out) = part(table(), 128 * MIB, None);
        assert_eq!((cases.len(), left_out.len()), (all.len(), 0));
    }

    #[test]
    fn what_does_not_fit_a_small_span_is_left_out() {
        let (cases, left_out) = part(table(), 32 * MIB, None);
        let ids = ids(&cases);
        for id in [
            "rdma/get/32x1MiB",
            "rdma/put/32x64x16KiB",
            "rdma/put/128x256KiB",
        ] {
            assert!(ids.contains(&id), "{id}");
        }
        assert!(left_out[0].cases.contains(&"rdma/get/16x8MiB".to_owned()));
        assert!(
            left_out[0]
                .cases
                .contains(&"shm/view-known/16MiB".to_owned())
        );
    }
}
