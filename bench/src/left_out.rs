//! The selected cases that cannot be measured here, with the reasons.

use super::agent::protocol::Way;
use super::cases::{Case, Goal, Path};
use super::veth::Veth;
use kvctl::connection::Connection;
use kvctl::{doctor, output};
use serde::Serialize;
use std::sync::Arc;

/// Cases that are left out for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LeftOut {
    /// The names of the cases.
    pub(crate) cases: Vec<String>,
    pub(crate) reason: String,
}

impl LeftOut {
    /// The text for people.
    pub(crate) fn text(&self) -> String {
        let Self { cases, reason } = self;
        match cases.as_slice() {
            [one] => format!("{one} was skipped: {reason}"),
            several => format!("{} cases were skipped: {reason}", several.len()),
        }
    }
}

/// Separates the cases that can be measured from those left out. Transfers cycle through `span` bytes;
/// `no_rdma` is the reason why there is no RDMA.
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

/// The link of the TCP cases, and its description. Without a link the cases use loopback and have no goal.
pub(crate) fn path(cases: &mut [Case], connection: &Connection) -> (Option<Arc<Veth>>, String) {
    if !cases.iter().any(|case| case.place.path == Path::Veth) {
        return (None, String::new());
    }
    let reason = if connection.master.is_some() {
        "the network to the named pool, their limits over loopback".to_owned()
    } else {
        match Veth::create() {
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

/// The reason why the selected RDMA cases cannot run, if they cannot.
pub(crate) async fn no_rdma(
    cases: &[Case],
    connection: &Connection,
) -> anyhow::Result<Option<String>> {
    if !cases.iter().any(|case| case.place.way == Way::Rdma) {
        return Ok(None);
    }
    doctor::no_rdma(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::table;

    const MIB: u64 = 1 << 20;

    fn ids(cases: &[Case]) -> Vec<&str> {
        cases.iter().map(|case| case.id.as_str()).collect()
    }

    #[test]
    fn rdma_cases_are_left_out_without_rdma_with_one_reason() {
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
    fn cases_that_do_not_fit_the_span_are_left_out() {
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
