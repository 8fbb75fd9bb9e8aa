use super::connect_to;
use crate::testing::Authority;
use crate::{Caller, Port, accept};
use std::time::Duration;
use tokio::net::TcpListener;

/// Like a name whose first host does not answer.
#[tokio::test]
async fn an_address_that_does_not_answer_keeps_no_caller_from_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = Authority::new(directory.path(), "authority").ends();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let right = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        accept(server.config(Port::Control), stream).await.unwrap()
    });
    let found = vec![silent.local_addr().unwrap(), right];
    let connecting = connect_to(found, client, right.to_string());
    let connected = tokio::time::timeout(Duration::from_secs(10), connecting).await;
    let _stream = connected.expect("it waits for the first").unwrap();
    assert!(matches!(serving.await.unwrap(), Caller::Grpc(_)));
}
