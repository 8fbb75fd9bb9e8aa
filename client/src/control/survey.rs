//! The cluster status as every master that can be found reports it.

use super::master::Master;
use crate::clock::Deadline;
use crate::errors::{ConnectError, ControlError};
use crate::options::read_masters;
use futures::future::join_all;
use kvpool_auth::Credentials;
use kvpool_etcd::discover::Location;
use kvpool_proto::{Caller, ClusterReply};
use kvpool_tls::{ClientFiles, ClientTls};
use kvpool_types::Code;
use std::time::Duration;
use tokio::runtime::Handle;

/// A master's address, and its answer or the reason why it gave none.
pub(crate) type Said = (String, Result<ClusterReply, ControlError>);

/// Asks the masters at `addresses` for the cluster status, and then the leaders that they name. With
/// `overview`, each is also asked for its overview. Must be called on a tokio runtime.
pub(crate) async fn survey(
    addresses: &[String],
    tls: &ClientFiles,
    overview: bool,
    timeout: Duration,
    credentials: &Credentials,
) -> Result<Vec<Said>, ConnectError> {
    if addresses.is_empty() {
        return Err(ConnectError::NoMasters);
    }
    let addresses = read_masters(addresses)?;
    let tls = ClientTls::open(tls).map_err(|error| ConnectError::Tls(error.to_string()))?;
    let tls = tls.map(|tls| tls.among(&addresses));
    let tls = tls.as_ref();
    let mut given: Vec<String> = Vec::new();
    for address in &addresses {
        if !Location::is_meant_by(address) {
            given.push(address.clone());
            continue;
        }
        let location = Location::parse(address).map_err(|error| ConnectError::BadAddress {
            address: address.clone(),
            reason: error.to_string(),
        })?;
        let found = location.masters(timeout).await;
        let found = found.map_err(|error| refused(address, error.to_string()))?;
        if found.is_empty() {
            return Err(refused(address, "no master is announced there".to_owned()));
        }
        given.extend(found);
    }
    given.sort_unstable();
    given.dedup();
    let is_given = |address: &str| addresses.iter().any(|given| given == address);
    let mut said = ask_all(&given, is_given, tls, overview, timeout, credentials).await?;
    let mut leaders: Vec<String> = said
        .iter()
        .filter_map(|(_, answer)| Some(answer.as_ref().ok()?.leader.clone()))
        .filter(|leader| !leader.is_empty() && !given.contains(leader))
        .collect();
    leaders.sort_unstable();
    leaders.dedup();
    said.extend(ask_all(&leaders, is_given, tls, overview, timeout, credentials).await?);
    Ok(said)
}

/// Asks each master. An address that cannot be called is an error if the caller gave it. If another master
/// named it, it counts as a master without an answer.
async fn ask_all(
    addresses: &[String],
    is_given: impl Fn(&str) -> bool,
    tls: Option<&ClientTls>,
    overview: bool,
    timeout: Duration,
    credentials: &Credentials,
) -> Result<Vec<Said>, ConnectError> {
    let background = Handle::current();
    let (mut masters, mut uncalled) = (Vec::new(), Vec::new());
    for address in addresses {
        match Master::new(address, Duration::ZERO, credentials, tls, &background, None) {
            Ok(master) => masters.push(master),
            Err(error) if is_given(address) => return Err(error),
            Err(error) => {
                let error = ControlError::new(Code::InvalidArgument, error.to_string());
                uncalled.push((address.clone(), Err(error)));
            }
        }
    }
    let deadline = Deadline::after(timeout);
    let asks = masters.into_iter().map(|master| async move {
        let answer = master.ask_for(Caller::default(), overview, deadline).await;
        (master.address, answer)
    });
    let mut said = join_all(asks).await;
    said.extend(uncalled);
    Ok(said)
}

fn refused(address: &str, message: String) -> ConnectError {
    ConnectError::Refused {
        masters: address.to_owned(),
        source: ControlError::new(Code::Unreachable, message),
    }
}
