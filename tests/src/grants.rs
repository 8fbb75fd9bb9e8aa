//! The steps of a put by hand, so that a test can stop between any two of them.

use anyhow::{Context, bail};
use kvpool_proto as proto;
use kvpool_proto::pool_client::PoolClient;
use kvpool_types::wire::keys;
use kvpool_types::{
    Checksum, ClusterId, Code, Epoch, Extent, Grant, GrantId, Incarnation, Key, Length, Offset,
    SegmentId, Version,
};
use tonic::transport::Channel;

/// A control connection without the client library.
#[derive(Debug)]
pub struct Control {
    client: PoolClient<Channel>,
    /// The pool's id.
    pub cluster: ClusterId,
    /// The master's term.
    pub epoch: Epoch,
}

/// One granted extent, and its node.
#[derive(Clone, Debug)]
pub struct Granted {
    /// The permission to write.
    pub grant: Grant,
    /// The node's incarnation.
    pub incarnation: Incarnation,
    /// The node's data port.
    pub data_address: String,
    /// The node's Unix socket.
    pub shm_path: String,
}

impl Control {
    /// Connects and says hello.
    pub async fn connect(master: &str) -> anyhow::Result<Self> {
        let mut client = PoolClient::connect(master.to_owned()).await?;
        let hello = client
            .hello(proto::HelloRequest {
                spin_us: 0,
                features: 0,
                min_version: 1,
                max_version: 1,
                caller: None,
                ..Default::default()
            })
            .await?
            .into_inner();
        let cluster = ClusterId::from_slice(&hello.cluster_id).context("a cluster id")?;
        Ok(Self {
            client,
            cluster,
            epoch: Epoch(hello.epoch),
        })
    }

    /// The generated gRPC client.
    pub fn raw(&mut self) -> &mut PoolClient<Channel> {
        &mut self.client
    }

    /// The caller's fields, which every request carries.
    pub fn caller(&self) -> Option<proto::Caller> {
        Some(proto::Caller {
            cluster_id: self.cluster.to_bytes().to_vec().into(),
            epoch: self.epoch.0,
            ..Default::default()
        })
    }

    /// Reserves room for one block.
    pub async fn reserve(
        &mut self,
        key: &Key,
        length: u64,
        grant_ttl_ms: u64,
    ) -> anyhow::Result<Granted> {
        let request = proto::ReserveRequest {
            caller: self.caller(),
            keys: keys::pack([key]).into(),
            lengths: vec![length],
            timeout_ms: 5000,
            grant_ttl_ms,
            ..Default::default()
        };
        let reply = self.client.reserve(request).await?.into_inner();
        let reservation = reply.reservations.first().context("a reservation")?;
        if reservation.code != u32::from(Code::Ok.to_wire()) {
            bail!("reserve answered code {}", reservation.code);
        }
        let extent = reservation.extents.first().context("an extent")?;
        let node = reply.nodes.get(extent.node as usize).context("a node")?;
        Ok(Granted {
            grant: Grant {
                extent: Extent {
                    segment: SegmentId(extent.segment),
                    offset: Offset(extent.offset),
                    length: Length(length),
                },
                epoch: self.epoch,
                id: GrantId(reservation.version),
                mac: extent.mac.as_ref().try_into()?,
            },
            incarnation: Incarnation::from_slice(&node.incarnation).context("an incarnation")?,
            data_address: node.data_address.clone(),
            shm_path: node.shm_path.clone(),
        })
    }

    /// Commits one block, and returns the code of the outcome.
    pub async fn commit(
        &mut self,
        key: &Key,
        granted: &Granted,
        checksum: Checksum,
    ) -> anyhow::Result<Code> {
        let Grant { extent, id, .. } = granted.grant;
        let item = proto::CommitItem {
            version: Version(id.0).0,
            length: extent.length.0,
            checksum: checksum.0,
            segments: vec![extent.segment.0],
            parent: 0,
        };
        let request = proto::CommitRequest {
            caller: self.caller(),
            keys: keys::pack([key]).into(),
            items: vec![item],
            ..Default::default()
        };
        let reply = self.client.commit(request).await?.into_inner();
        let code = reply.codes.first().copied().context("a code")?;
        u16::try_from(code)
            .ok()
            .and_then(Code::from_wire)
            .context("a known code")
    }
}
