//! The framed side of a master's port: each frame is a call of the gRPC service.

use super::master::Master;
use kvpool_proto::pool_server::Pool;
use kvpool_proto::{CODE_METADATA, HelloRequest};
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::{Code, Epoch};
use prost::Message;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};

/// Serves one connection until it ends. A call that waits does not delay later calls.
pub(super) async fn serve(master: Arc<Master>, stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut from, to) = stream.into_split();
    let to = Arc::new(Mutex::new(to));
    loop {
        let mut head = [0; HEADER_BYTES];
        from.read_exact(&mut head).await?;
        let header = Header::decode(&head).unwrap();
        let mut meta = vec![0; header.meta as usize];
        from.read_exact(&mut meta).await?;
        let (master, to) = (Arc::clone(&master), Arc::clone(&to));
        tokio::spawn(async move {
            let (op, meta) = answer(&master, header.op, &meta).await;
            let head = Header {
                version: VERSION,
                op,
                request: header.request,
                epoch: Epoch(0),
                meta: u32::try_from(meta.len()).unwrap(),
                payload: 0,
            };
            let frame = [head.encode().to_vec(), meta].concat();
            // The client may have closed the connection.
            let _ = to.lock().await.write_all(&frame).await;
        });
    }
}

async fn answer(master: &Arc<Master>, op: Op, meta: &[u8]) -> (Op, Vec<u8>) {
    fn read<M: Message + Default>(meta: &[u8]) -> Request<M> {
        Request::new(M::decode(meta).unwrap())
    }
    match op {
        Op::Ping => (Op::Pong, Vec::new()),
        Op::Greet => reply(master.hello(read::<HelloRequest>(meta)).await),
        Op::Reserve => reply(master.reserve(read(meta)).await),
        Op::Commit => reply(master.commit(read(meta)).await),
        Op::Lookup => reply(master.lookup(read(meta)).await),
        Op::Exist => reply(master.exist(read(meta)).await),
        Op::MatchPrefix => reply(master.match_prefix(read(meta)).await),
        Op::Renew => reply(master.renew(read(meta)).await),
        Op::Release => reply(master.release(read(meta)).await),
        other => panic!("{other:?} is no call"),
    }
}

fn reply<M: Message>(answer: Result<Response<M>, Status>) -> (Op, Vec<u8>) {
    let status = match answer {
        Ok(reply) => return (Op::Reply, reply.into_inner().encode_to_vec()),
        Err(status) => status,
    };
    let code = status.metadata().get(CODE_METADATA);
    let code = code.map(|code| code.to_str().unwrap().parse().unwrap());
    let mut out = Vec::new();
    Failure {
        code: code.and_then(Code::from_wire).unwrap_or(Code::Unreachable),
        message: status.message().to_owned(),
    }
    .encode(&mut out);
    (Op::Failure, out)
}
