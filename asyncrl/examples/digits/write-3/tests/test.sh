#!/bin/bash
reward=0
[ "$(head -c 1 /app/answer)" = 3 ] && reward=1
echo $reward > /logs/verifier/reward.txt
